"""A chat that remembers its turns; only what is new is read."""

import edgeinfer

with edgeinfer.load("tiny") as model:
    chat = model.chat(system="Be kind.", max_tokens=40, seed=3)
    for question in ("Hi! Who are you?", "Do you like foxes?"):
        answer = chat.say(question)
        print(f"> {question}\n{answer.text.strip()}")
        print(f"  ({answer.speed.cached_tokens} of {answer.speed.prompt_tokens} tokens were in the cache)\n")
