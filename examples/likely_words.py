"""What might come next, and how likely each of it is."""

import math

import edgeinfer

with edgeinfer.load("tiny") as model:
    answer = model.generate("Once upon a", max_tokens=3, temperature=0.0, logprobs=4)
    for token in answer.tokens:
        best = ", ".join(
            f"{model.tokenizer.decode([token_id])!r} {math.exp(logprob):.0%}"
            for token_id, logprob in token.top_logprobs
        )
        print(f"{token.text!r:12} of {best}")
