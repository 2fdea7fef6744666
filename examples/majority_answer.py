"""The most frequent answer of several completions (self-consistency)."""

import re

import edgeinfer


def first_animal(text: str) -> str | None:
    """The first animal in a text, None without one."""
    found = re.search(r"\b(bear|bird|cat|dog|fox|frog|mouse|owl|rabbit)\b", text.lower())
    return found[1] if found else None


with edgeinfer.load("tiny") as model:
    completions = model.generate("In the wood the girl met a", n=12, max_tokens=24, seed=1)
    animal, share = edgeinfer.majority(completions, first_animal)
    print(f"{animal}: {share:.0%} of the completions with an animal")
