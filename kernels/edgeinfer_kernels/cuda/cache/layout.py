"""Where the sequences of a decode step are in the cache."""

from typing import Literal

import numpy as np

from edgeinfer_kernels.backend import PAGE, BatchPositions
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS

Layout = Literal["text", "pages", "batch"]
"""Text: one sequence, from the first position of the cache on. Pages: one sequence, in pages anywhere. Batch:
several sequences in pages, with consecutive tokens of each.
"""
TEXT: Layout = "text"
PAGES: Layout = "pages"
BATCH: Layout = "batch"


def tokens_of_sequence(is_four_bit: bool) -> int:
    """Maximum number of tokens of a sequence in a batch: each token appends those of its sequence up to
    itself again, which is expensive if keys or values have four bits.
    """
    return 1 if is_four_bit else MAX_TOKENS


def is_chunk(batch: BatchPositions) -> bool:
    """Whether the tokens are consecutive ones of one sequence."""
    positions, pages = batch.positions, batch.pages
    is_one = pages.strides[0] == 0 or bool((pages == pages[0]).all())
    return is_one and bool((np.diff(positions) == 1).all())


def first_tokens(batch: BatchPositions) -> list[int]:
    """For each token the first one of the step that belongs to the same sequence: a token belongs to that of
    the one before it if it has the next position in the same pages.
    """
    firsts: list[int] = []
    for token, position in enumerate(batch.positions):
        continues = token > 0 and position == batch.positions[token - 1] + 1
        firsts.append(firsts[-1] if continues and _follows(batch, token - 1, token) else token)
    return firsts


def _follows(batch: BatchPositions, other: int, token: int) -> bool:
    """Whether a token attends to the `other` one, at an earlier position."""
    page = batch.positions[other] // PAGE
    is_earlier = batch.positions[other] < batch.positions[token]
    return bool(is_earlier and batch.pages[token, page] == batch.pages[other, page])


def is_one_step(batch: BatchPositions) -> bool:
    """Whether each token attends only to those before it in a row of consecutive ones of its sequence."""
    firsts = first_tokens(batch)
    return all(
        other >= firsts[token] or not _follows(batch, other, token)
        for token in range(len(firsts))
        for other in range(token)
    )


def independent_tokens(batch: BatchPositions) -> list[list[int]]:
    """The tokens in steps, one after the other, in which no token attends to another one."""
    steps: list[list[int]] = []
    step_of: list[int] = []
    for token in range(len(batch.positions)):
        earlier = [step_of[other] for other in range(token) if _follows(batch, other, token)]
        step_of.append(max(earlier, default=-1) + 1)
        if step_of[-1] == len(steps):
            steps.append([])
        steps[step_of[-1]].append(token)
    return steps
