"""Where the sequences of a decode step are in the cache."""

from typing import Literal

import numpy as np

from edgeinfer_kernels.backend import PAGE, BatchPositions

Layout = Literal["text", "pages", "batch"]
"""Text: one sequence, from the first position of the cache on. Pages: one sequence, in pages anywhere. Batch:
each token of the step has its own sequence, in pages.
"""
TEXT: Layout = "text"
PAGES: Layout = "pages"
BATCH: Layout = "batch"


def is_chunk(batch: BatchPositions) -> bool:
    """Whether the tokens are consecutive ones of one sequence."""
    positions, pages = batch.positions, batch.pages
    is_one = pages.strides[0] == 0 or bool((pages == pages[0]).all())
    return is_one and bool((np.diff(positions) == 1).all())


def independent_tokens(batch: BatchPositions) -> list[list[int]]:
    """The tokens in steps, one after the other, in which no token attends to another one."""
    steps: list[list[int]] = []
    step_of: list[int] = []
    for token, (position, pages) in enumerate(zip(batch.positions, batch.pages, strict=True)):
        earlier = [
            step_of[other]
            for other in range(token)
            if batch.positions[other] < position
            and pages[batch.positions[other] // PAGE] == batch.pages[other, batch.positions[other] // PAGE]
        ]
        step_of.append(max(earlier, default=-1) + 1)
        if step_of[-1] == len(steps):
            steps.append([])
        steps[step_of[-1]].append(token)
    return steps
