"""The shortest program: a model, a prompt, text as it comes."""

import edgeinfer

with edgeinfer.load("tiny") as model:
    stream = model.stream("Once upon a time", max_tokens=80, seed=7)
    for token in stream:
        print(token.text, end="", flush=True)
    print(f"\n\n{stream.result.speed.decode_tokens_per_second:.0f} tokens a second")
