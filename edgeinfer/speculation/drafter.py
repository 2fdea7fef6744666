"""What a drafter is: it proposes the tokens after a text, with their probabilities.

A drafter may read the hidden states of its target: it names the layers in `hidden_layers`, and the target
calls `observe` after each of its steps.
"""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:  # options check for drafters, and sampling imports the options
    from edgeinfer.engine.hidden_states import HiddenStep
    from edgeinfer.sampling import SamplingParams
    from edgeinfer.sampling.sampler import Distribution


class Draft(NamedTuple):
    """Draft tokens in order.

    `distributions`: those from which the tokens were sampled, each (ids, rising; their probabilities, all
    above 0, sum 1); None: not sampled, each token is the drafter's only candidate.
    """

    ids: tuple[int, ...] = ()
    distributions: "tuple[Distribution, ...] | None" = None
    siblings: tuple[tuple[int, ...], ...] = ()
    """For each of the tokens, or empty: its tree siblings. The draft is then a tree of one trunk and
    siblings; its tokens aren't sampled."""

    probs: tuple[float, ...] = ()
    """For each of the tokens, or empty: the drafter's probability, given the tokens before."""

    @property
    def sibling_tokens(self) -> list[tuple[int, int]]:
        """(index, token) of all tree siblings, in processing order."""
        if not self.siblings:  # the usual case, and this is called several times per forward
            return []
        return [(index, token) for index, tokens in enumerate(self.siblings) for token in tokens]


class DraftRequest(NamedTuple):
    """The request for a draft. A drafter that estimates no probabilities may ignore the last two."""

    max_tokens: int
    params: "SamplingParams"
    """Sampling parameters of the completion."""
    min_prob: float = 0.0
    """Minimum probability that a draft token is reached (the product of its probability and the earlier
    ones), for it to be verified."""
    min_prob_to_continue: float = 0.0
    """Minimum probability that a draft token is reached, for drafting another one after it."""


class DraftText(NamedTuple):
    """One of several texts that are decoded together; `key` stays the same while the text grows."""

    key: Hashable
    history: Sequence[int]
    request: DraftRequest


@runtime_checkable
class Drafter(Protocol):
    """Proposes draft tokens. Only `propose` is required of a subclass."""

    @property
    def name(self) -> str:
        """For messages, and for the stored draft statistics."""
        return type(self).__name__

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it uses."""
        return 0

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        """At most `request.max_tokens` tokens after `history`, which is the prompt and the completion so far;
        an empty draft if there is none.
        """
        ...

    def propose_each(self, texts: Sequence[DraftText]) -> list[Draft]:
        """As `propose` for several texts, without distributions and siblings. Steps of several texts hand out
        no hidden states, so a drafter that reads these has no drafts for them.
        """
        if self.hidden_layers:
            return [Draft()] * len(texts)
        drafts = (self.propose(text.history, text.request) for text in texts)
        return [Draft(draft.ids, probs=draft.probs) for draft in drafts]

    def forget(self, key: Hashable) -> None:
        """The text with this key has ended."""
        return

    @property
    def hidden_layers(self) -> Sequence[int]:
        """After how many of the target's layers it reads hidden states: 0 for the embedding, `OUTPUT_NORM`
        (-1) for the input of the head. Empty: none, and then the target copies nothing.
        """
        return ()

    def observe(self, step: "HiddenStep") -> None:
        """Called after each step of the target that processes tokens of one text, with the hidden states of
        `hidden_layers`. Tokens after `step.start` that were observed before are no longer part of the text.
        """
        return

    def close(self) -> None:
        """Release threads and memory."""
        return


class ChainedDrafter(Drafter):
    """Several drafters, cheapest first: the first non-empty draft is used."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)
        reading = [drafter for drafter in drafters if drafter.hidden_layers]
        self._reading = reading[0] if reading else None
        """The one that reads hidden states; there is at most one."""

    @property
    def name(self) -> str:
        return ", then ".join(drafter.name for drafter in self._drafters)

    @property
    def hidden_layers(self) -> Sequence[int]:
        return () if self._reading is None else self._reading.hidden_layers

    def observe(self, step: "HiddenStep") -> None:
        """Pass the step on."""
        if self._reading is not None:
            self._reading.observe(step)

    @property
    def nbytes(self) -> int:
        return sum(drafter.nbytes for drafter in self._drafters)

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        """The first non-empty draft."""
        return next(
            (draft for drafter in self._drafters if (draft := drafter.propose(history, request)).ids), Draft()
        )

    def propose_each(self, texts: Sequence[DraftText]) -> list[Draft]:
        """For each text the first non-empty draft."""
        drafts = [Draft()] * len(texts)
        for drafter in self._drafters:
            missing = [index for index, draft in enumerate(drafts) if not draft.ids]
            if not missing:
                break
            for index, draft in zip(
                missing, drafter.propose_each([texts[index] for index in missing]), strict=True
            ):
                drafts[index] = draft
        return drafts

    def forget(self, key: Hashable) -> None:
        for drafter in self._drafters:
            drafter.forget(key)

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()
