"""Request and result types of a backend that drafts several tokens in one call."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.caches.state_rows import StateRows

DRAFT_ROWS = 2048
"""The first rows of the output that a draft head is limited to are a multiple of this number."""


@dataclass(frozen=True)
class DraftSampling:
    """Sampling parameters of the draft. Temperature 0 selects the argmax. Otherwise top-k (0: off), top-p and
    min-p are applied in this order, then softmax(logits / temperature) is sampled.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class VerifyingStep(NamedTuple):
    """The step that verifies a draft: the text's last token, and its position in the target. `requests`:
    sampling requests for the tokens after it and after each of the draft's, if it is expected that they are
    sampled; empty: the most probable ones.
    """

    token: int
    start: int
    requests: Sequence[Sequence[float]] = ()


class DraftRequest(NamedTuple):
    """Parameters of a draft of at most len(min_probs) tokens.

    The draft ends before token i if the product of its probability and the earlier ones is below
    min_probs[i].
    It ends after token i if that product is below min_probs_to_continue[i], if given; a backend that makes
    all tokens at once ignores these. `id_limit`: only token ids below this value may be drafted. `uniforms`:
    empty, or one uniform number in [0, 1) for each draft token, used to sample it; if empty, the argmax is
    drafted. `step`: verifies the draft, and is started as soon as that is made; no token is dropped then.
    None: no step is.
    """

    min_probs: Sequence[float]
    min_probs_to_continue: Sequence[float]
    id_limit: int
    sampling: DraftSampling
    uniforms: Sequence[float] = ()
    step: VerifyingStep | None = None


class CyclesRequest(NamedTuple):
    """Parameters of a run of at most `max_cycles` drafts, each of which is verified by a step of the target.

    `start`: the position in the target of the text's last token, whose successors are drafted; `token`: this
    token. `limit`: the first draft has at most as many tokens, a later one as many less as tokens were found
    before it; the run ends where none is left. `end_ids`: after one of these tokens it ends, too. `states`:
    where the states of the target are written, of the token at `start` and of those after it.
    """

    token: int
    start: int
    limit: int
    end_ids: Collection[int]
    max_cycles: int
    states: StateRows


class DraftCycle(NamedTuple):
    """A draft with the probabilities of its tokens, and what the step of the target found after the text: the
    right tokens of the draft, and the one after them. The seconds of both.
    """

    ids: list[int]
    probs: list[float]
    found: list[int]
    draft_seconds: float
    step_seconds: float


class DraftedTokens(NamedTuple):
    """Consecutive draft tokens, each with its probability in the draft distribution (float32).

    `read`: how many tokens were evaluated, including the given ones. The last draft token is evaluated only
    if a further token was below the threshold after it. `candidates`: for each draft token the ids that it
    was sampled from (ascending) and their weights (float32); empty if nothing was sampled. `made`: how many
    tokens were drafted, with those that were dropped; 0: one more than `ids` at most.
    """

    ids: list[int]
    probs: list[float]
    read: int
    candidates: tuple[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]], ...] = ()
    made: int = 0
