"""What a drafter is: it proposes the tokens after a text, with their probabilities.

A drafter may read the hidden states of its target: it names the layers in `hidden_layers`, and the target
calls `observe` after each of its steps.
"""

from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:  # options check for drafters, and sampling imports the options
    from edgeinfer.engine.hidden_states import HiddenStep
    from edgeinfer.engine.protocols import Engine
    from edgeinfer.sampling import SamplingParams
    from edgeinfer.sampling.sampler import Distribution
    from edgeinfer_kernels.draft_loop import DraftCycle


class Draft(NamedTuple):
    """Draft tokens in order.

    `distributions`: those from which the tokens were sampled, each (ids, rising; their probabilities, all
    above 0, sum 1); None: not sampled, each token is the drafter's only candidate.
    """

    ids: tuple[int, ...] = ()
    distributions: "tuple[Distribution, ...] | None" = None
    parents: tuple[int, ...] = ()
    """For each of the tokens the index of the one before it, -1 for the last token of the text; a parent
    comes before its children, and the most probable child comes first. The draft is then a tree, whose tokens
    aren't sampled. Empty: each token follows the one before it."""

    probs: tuple[float, ...] = ()
    """For each of the tokens, or empty: the drafter's probability, given the tokens before."""
    made: int = 0
    """How many tokens, or levels of a tree, were made one after the other, with those that were dropped; 0:
    as many as `depth`."""

    def children(self, node: int) -> list[int]:
        """The indices of the tokens after one; -1: those after the text."""
        if not self.parents:
            return [node + 1] if node + 1 < len(self.ids) else []
        return [index for index, parent in enumerate(self.parents) if parent == node]

    def child(self, node: int, token: int) -> int | None:
        """The index of a token after one; None: it wasn't drafted."""
        if not self.parents:
            return node + 1 if node + 1 < len(self.ids) and self.ids[node + 1] == token else None
        return next((index for index in self.children(node) if self.ids[index] == token), None)

    @property
    def depth(self) -> int:
        """The number of tokens of the longest path."""
        if not self.parents:
            return len(self.ids)
        depths = list[int]()
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths)

    @property
    def chain(self) -> "Draft":
        """The path of the first children."""
        if not self.parents:
            return self
        path, node = list[int](), -1
        while following := self.children(node):
            node = following[0]
            path.append(node)
        return Draft(
            tuple(self.ids[node] for node in path), probs=tuple(self.probs[n] for n in path if self.probs)
        )


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
    max_nodes: int = 0
    """Maximum tokens of a draft that is a tree, of at most `max_tokens` levels; 0: it is a chain."""
    sharpness: float = 1.0
    """The power of a tree's probabilities, normalized again, that is measured to match their acceptance."""
    vocabulary: int = 0
    """Only token ids below this may be drafted: the `short_vocabulary` of the drafter; 0: all."""


class CycleLimits(NamedTuple):
    """What ends a run of drafts and of the steps that verify them: `tokens`, of which each draft leaves place
    for one more; one of the `end_ids` among those that were found; the number of `cycles`.
    """

    tokens: int
    end_ids: Collection[int]
    cycles: int


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

    @property
    def tree_width(self) -> int:
        """How many candidates its trees have after a token; 1: its drafts are chains."""
        return 1

    @property
    def ends_drafts(self) -> bool:
        """Whether its chains end after a token from which no other pays (`min_prob_to_continue`), so that
        longer ones than usually pay can be requested.
        """
        return False

    @property
    def short_vocabulary(self) -> int:
        """The number of first token ids from which it can draft in less time than from all; 0: it can't."""
        return 0

    @property
    def short_cost(self) -> float:
        """The expected cost of a draft token of the short vocabulary, relative to one of all, until it is
        measured.
        """
        return 1.0

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        """At most `request.max_tokens` tokens after `history`, which is the prompt and the completion so far;
        an empty draft if there is none.
        """
        ...

    def max_cycles(self, engine: "Engine") -> int:
        """Maximum cycles of a call of `run_cycles`; 0: there are none."""
        return 0

    def run_cycles(
        self, history: Sequence[int], request: DraftRequest, limits: CycleLimits
    ) -> "list[DraftCycle]":
        """Draft after `history`, whose tokens but the last one the engine has cached, let the engine verify
        the draft with its most probable tokens, and repeat this after these tokens until `limits` end the
        run. The engine then has cached all tokens but the last one. Nothing is done if the result is empty.
        """
        return []

    def prepare_each(self, texts: Sequence[DraftText]) -> list[bool]:
        """Read what is to be read of several texts before a draft, if there is much of it only a part; for
        each text whether it can be drafted for now. Steps of several texts hand out no hidden states, so a
        drafter that reads these has no drafts for them.
        """
        return [not self.hidden_layers] * len(texts)

    def propose_each(self, texts: Sequence[DraftText]) -> list[Draft]:
        """As `propose` for several texts that are prepared: chains, without distributions."""
        drafts = (self.propose(text.history, text.request).chain for text in texts)
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
        While drafting pauses for long, steps are left out: the next one then doesn't continue the last one.
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
        self._ready: list[set[Hashable]] = [set() for _ in drafters]
        """The texts that each can draft for in this step."""
        self._reading = reading[0] if reading else None
        """The one that reads hidden states; there is at most one."""

    @property
    def name(self) -> str:
        return ", then ".join(drafter.name for drafter in self._drafters)

    @property
    def tree_width(self) -> int:
        return max(drafter.tree_width for drafter in self._drafters)

    @property
    def ends_drafts(self) -> bool:
        return all(drafter.ends_drafts for drafter in self._drafters)

    @property
    def short_vocabulary(self) -> int:
        return max(drafter.short_vocabulary for drafter in self._drafters)

    @property
    def short_cost(self) -> float:
        return min(drafter.short_cost for drafter in self._drafters)

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

    def prepare_each(self, texts: Sequence[DraftText]) -> list[bool]:
        ready = [drafter.prepare_each(texts) for drafter in self._drafters]
        self._ready = [
            {text.key for text, is_ready in zip(texts, each, strict=True) if is_ready} for each in ready
        ]
        return [any(each) for each in zip(*ready, strict=True)]

    def propose_each(self, texts: Sequence[DraftText]) -> list[Draft]:
        """For each text the first non-empty draft."""
        drafts = [Draft()] * len(texts)
        for drafter, ready in zip(self._drafters, self._ready, strict=True):
            missing = [at for at, text in enumerate(texts) if text.key in ready and not drafts[at].ids]
            made = drafter.propose_each([texts[at] for at in missing]) if missing else []
            for at, draft in zip(missing, made, strict=True):
                drafts[at] = draft
        return drafts

    def forget(self, key: Hashable) -> None:
        for drafter in self._drafters:
            drafter.forget(key)

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()
