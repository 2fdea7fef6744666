"""An answer whose points are completed together (Skeleton-of-Thought, arXiv:2307.15337)."""

import time

import edgeinfer

HEADINGS = ("an old tree", "a little river", "a friendly owl", "a small house")
"""With a large model, the lines of a first, short completion that asks for the points only."""


def prompt(heading: str) -> str:
    """The prompt for one point: all of them share its first part, which is read once."""
    return f"Once upon a time a little fox walked through the wood. Then the fox came to {heading}. The fox"


with edgeinfer.load("tiny", context=256, parallel=len(HEADINGS)) as model:
    begin = time.perf_counter()
    points = model.generate([prompt(heading) for heading in HEADINGS], max_tokens=32, temperature=0.5, seed=1)
    together = time.perf_counter() - begin
    for heading, point in zip(HEADINGS, points, strict=True):
        print(f"- {heading}: The fox{point.text.split('.')[0]}.")
    tokens = sum(point.speed.generated_tokens for point in points)
    print(f"  ({tokens} tokens at {tokens / together:.0f} tokens/s)")
