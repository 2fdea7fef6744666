"""Scripted engines, and chains and trees with given acceptance rates at the cost of a model or a head.

With random weights no small model can predict the tokens. So baseline decoding runs first, and the drafter
proposes its tokens, each replaced with a given probability. For every token it evaluates the small model and
ignores the logits.
"""

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.hidden_states import HiddenObserver, HiddenStep
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.engine.protocols import BasicEngine, Engine, Progress, PromptSteps, TokenSampler
from edgeinfer.sampling import Sampler
from edgeinfer.snapshots.snapshot_file import Snapshot
from edgeinfer.speculation.drafter import Draft, Drafter, DraftRequest
from edgeinfer.speculation.trees.tree_growth import ROOT, TreeGrowth
from edgeinfer_kernels.caches.tree_pages import tree_positions

CERTAIN = 1e4
"""The logit of the token that comes next, above all logits of a model."""
OF_THE_REST = (0.3, 0.15, 0.08)
"""Probabilities of the second, third and fourth candidate, given that the first is wrong."""
CLAIM = 0.02
"""Minimum probability that a head gives a candidate, even if none is ever right."""


class ScriptedSampler:
    """Evaluates as `sampler`, and returns the tokens of a script instead of the sampled ones."""

    others = 0
    """How many sampled tokens weren't those of the script: a step that began with one ahead is repeated."""

    def __init__(self, sampler: TokenSampler, script: Sequence[int]) -> None:
        self._sampler = sampler
        self._script = script

    def next(self, history: Sequence[int], ahead: bool = True) -> int | None:
        """As the sampler's, with the token of the script."""
        sampled = self._sampler.next(history, ahead)
        if sampled is None:
            return None
        token = self._script[min(len(history), len(self._script) - 1)]
        ScriptedSampler.others += sampled != token
        return token


class ScriptedEngine(BasicEngine):
    """Evaluates `engine`; the logits select the tokens of `script`, prompt and completion, one by one."""

    def __init__(self, engine: Engine, script: Sequence[int]) -> None:
        self._engine = engine
        self._script = list(script)
        self.ids = engine.ids
        self.context = min(engine.context, len(script))
        self.largest_context = engine.largest_context
        self.vocabulary_size = engine.vocabulary_size
        self.bytes_per_token = engine.bytes_per_token

    def prompt_steps(self, ids: Sequence[int], limit: int | None = None) -> PromptSteps:
        """As the engine's, with the logits of the script."""
        logits = yield from self._engine.prompt_steps(ids, limit)
        self._set_logits(logits, len(self.ids))
        return logits

    def append_all(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """As the engine's, with the logits of the script."""
        logits = self._engine.append_all(ids)
        for row, end in zip(logits, range(len(self.ids) - len(ids) + 1, len(self.ids) + 1), strict=True):
            self._set_logits(row, end)
        return logits

    def append_best(self, ids: Sequence[int]) -> list[int] | None:
        """As the engine's, with the tokens of the script."""
        if self._engine.append_best(ids) is None:
            return None
        ends = range(len(self.ids) - len(ids) + 1, len(self.ids) + 1)
        return [self._script[min(end, len(self._script) - 1)] for end in ends]

    def _set_logits(self, logits: npt.NDArray[np.float32], index: int) -> None:
        logits[self._script[min(index, len(self._script) - 1)]] = CERTAIN

    def rows(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """As the engine's."""
        return self._engine.rows(ids)

    def snapshot(self) -> Snapshot | None:
        """As the engine's."""
        return self._engine.snapshot()

    def restore(self, snapshot: Snapshot, length: int) -> None:
        """As the engine's."""
        self._engine.restore(snapshot, length)

    def rewind(self, length: int) -> None:
        self._engine.rewind(length)

    def device_sampler(self, sampler: Sampler) -> TokenSampler | None:
        choice = self._engine.device_sampler(sampler)
        return ScriptedSampler(choice, self._script) if choice else None

    def hand_out(self, layers: Sequence[int], observer: HiddenObserver) -> None:
        """As the engine's."""
        self._engine.hand_out(layers, observer)

    def close(self) -> None:
        """Does nothing: the caller owns the engine."""


class PlantedDrafter(Drafter):
    """Draft tokens are accepted with the probability `agreement`; `answer`: ids of prompt and completion."""

    name = "planted"
    nbytes = 0

    def __init__(self, cost: Engine, answer: Sequence[int], agreement: float, seed: int = 1) -> None:
        self._cost = cost
        self._answer = list(answer)
        self._agreement = agreement
        self._random = random.Random(seed)

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        """As many of the requested tokens as are profitable by their probability of being reached.

        The first token that isn't is evaluated too, as with a real draft model.
        """
        known = self._answer[len(history) :] if history[0] == self._answer[0] else self._answer
        ids: list[int] = []
        self._catch_up(len(history) - 1)
        for token in known[: request.max_tokens]:
            read = history[-1] if not ids else ids[-1]
            self._cost.append([read % self._cost.vocabulary_size])
            if self._agreement ** (len(ids) + 1) < request.min_prob:
                break
            accepted = self._random.random() < self._agreement
            ids.append(token if accepted else (token + 1) % self._cost.vocabulary_size)
        return Draft(tuple(ids))

    def _catch_up(self, length: int) -> None:
        """Extend the cache to the text's length, as a real draft model does."""
        held = len(self._cost.ids)
        if held > length:
            self._cost.rewind(length)
        elif held < length:
            self._cost.append([0] * (length - held))

    def close(self) -> None:
        """It has no resources."""


class PlantedHead(Drafter):
    """Draft tokens that are accepted with given probabilities, at the cost of a real draft head.

    `agreements`: of the first draft token, of the second if the first is accepted, and so on; the last one is
    that of all further ones. `answer`: ids of prompt and completion. A draft of the head's short vocabulary
    is wrong where the answer's token isn't in it. `verified_by`: the engine whose device starts the step that
    verifies a draft.
    """

    name = "planted head"

    def __init__(
        self,
        head: Drafter,
        answer: Sequence[int],
        agreements: Sequence[float],
        vocabulary: int,
        verified_by: "ScriptedTrees | None" = None,
        seed: int = 1,
    ) -> None:
        starts = verified_by is not None and verified_by.capabilities.starts_verification
        self._verified_by = verified_by if starts else None
        self._head, self._answer, self._vocabulary = head, list(answer), vocabulary
        self._agreements = tuple(agreements)
        self._random = random.Random(seed)
        self.requests = self.short_requests = 0
        """How many drafts were requested, and how many of them of the short vocabulary."""

    @property
    def hidden_layers(self) -> Sequence[int]:
        return self._head.hidden_layers

    @property
    def short_vocabulary(self) -> int:
        return self._head.short_vocabulary

    @property
    def short_cost(self) -> float:
        return self._head.short_cost

    def observe(self, step: HiddenStep) -> None:
        """As the head's."""
        self._head.observe(step)

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        """As many of the requested tokens as are profitable by their probability of being reached.

        The first token that isn't is evaluated too, as with a real head; if the device starts the
        verification, all of them are made and verified.
        """
        self._count(request)
        known = self._answer[len(history) :] if history[0] == self._answer[0] else self._answer
        rates = [self._agreement(index) for index in range(min(len(known), request.max_tokens))]
        reached = np.cumprod(rates)
        kept = int((reached >= request.min_prob).sum())
        if not rates:
            return Draft()
        if self._verified_by is not None:
            kept = len(rates)
        evaluated = min(kept + 1, len(rates))
        wanted = DraftRequest(evaluated, request.params, vocabulary=request.vocabulary)
        drafted = self._head.propose(history, wanted)
        if not drafted.ids:
            return Draft()
        ids = [
            token if self._random.random() < rate else self._wrong(token)
            for token, rate in zip(known[:kept], rates, strict=False)
        ]
        if self._verified_by is not None:
            self._verified_by.evaluated = drafted.ids
        return Draft(tuple(self._drafted(token, request) for token in ids), made=drafted.made)

    def _count(self, request: DraftRequest) -> None:
        self.requests += 1
        self.short_requests += request.vocabulary > 0

    def _wrong(self, token: int, index: int = 0) -> int:
        """A token that isn't this one; each index has another."""
        return (token + 1 + index) % self._vocabulary

    def _drafted(self, token: int, request: DraftRequest) -> int:
        """The token, or if it can't be drafted one that is wrong."""
        return token if token < (request.vocabulary or self._vocabulary) else token % request.vocabulary

    def _agreement(self, index: int) -> float:
        return self._agreements[min(index, len(self._agreements) - 1)]

    def close(self) -> None:
        """The caller owns the head."""


class ScriptedTrees(NativeEngine):
    """An engine whose logits select the tokens of `script`, prompt and completion, one by one; as
    `ScriptedEngine`, and for trees.
    """

    evaluated: Sequence[int] = ()
    """The draft tokens of the step that the device has started, instead of those that are verified next."""
    _verified: Sequence[int] = ()

    def __init__(self, engine: NativeEngine, script: Sequence[int]) -> None:
        self.__dict__.update(vars(engine))
        self._script = list(script)
        self.cache.context = min(engine.context, len(script))

    def append(self, ids: Sequence[int], progress: Progress | None = None) -> npt.NDArray[np.float32]:
        """As the engine's, with the logits of the script."""
        logits = super().append(ids, progress)
        self._set(logits, len(self.ids))
        return logits

    def prompt_steps(self, ids: Sequence[int], limit: int | None = None) -> PromptSteps:
        """As the engine's, with the logits of the script."""
        logits = yield from super().prompt_steps(ids, limit)
        self._set(logits, len(self.ids))
        return logits

    def append_all(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """As the engine's, with the logits of the script."""
        logits = super().append_all(ids)
        for row, end in zip(logits, range(len(self.ids) - len(ids) + 1, len(self.ids) + 1), strict=True):
            self._set(row, end)
        return logits

    def append_best(self, ids: Sequence[int]) -> list[int] | None:
        """As the engine's, with the tokens of the script."""
        evaluated, self.evaluated = [ids[0], *self.evaluated], ()
        self._verified = ids
        try:
            found = super().append_best(evaluated if len(evaluated) == len(ids) else ids)
        finally:
            self._verified = ()
        if found is None:
            return None
        return self._following(range(len(self.ids) - len(ids) + 1, len(self.ids) + 1))

    def _processed(self, ids: Sequence[int]) -> None:
        """As the engine's; the cache has the verified tokens."""
        super()._processed(self._verified or ids)

    def append_tree(self, ids: Sequence[int], parents: Sequence[int]) -> npt.NDArray[np.float32]:
        """As the engine's; after each position the token of the script follows."""
        logits = super().append_tree(ids, parents)
        for row, position in zip(logits, tree_positions(len(self.ids), parents), strict=True):
            self._set(row, position + 1)
        return logits

    def best_of_tree(self, ids: Sequence[int], parents: Sequence[int]) -> list[int] | None:
        """As the engine's, with the tokens of the script."""
        if super().best_of_tree(ids, parents) is None:
            return None
        return self._following([position + 1 for position in tree_positions(len(self.ids), parents)])

    def _following(self, ends: Sequence[int]) -> list[int]:
        """The tokens of the script after texts of these lengths."""
        return [self._script[min(end, len(self._script) - 1)] for end in ends]

    def device_sampler(self, sampler: Sampler) -> TokenSampler | None:
        """As the engine's, with the tokens of the script."""
        choice = super().device_sampler(sampler)
        return ScriptedSampler(choice, self._script) if choice else None

    def _set(self, logits: npt.NDArray[np.float32], index: int) -> None:
        logits[self._script[min(index, len(self._script) - 1)]] = CERTAIN

    def close(self) -> None:
        """Does nothing: the caller owns the engine."""


class PlantedTrees(PlantedHead):
    """Trees at the cost of a real head's. The first candidate after the token of a level is right with the
    probability in `agreements`, whose last one is that of all further levels; the others as `OF_THE_REST`.
    """

    name = "planted trees"

    @property
    def tree_width(self) -> int:
        return self._head.tree_width

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        """A tree of the requested shape, as far as its levels are worth evaluating; the head evaluates as
        many levels.
        """
        self._count(request)
        known = self._answer[len(history) :] if history[0] == self._answer[0] else self._answer
        levels = min(len(known), request.max_tokens)
        growth = TreeGrowth(request._replace(max_tokens=levels), self.tree_width)
        nodes, right, made = [ROOT], ROOT, 0
        while nodes and made < levels:
            right, made = self._add_level(growth, nodes, right, known[made], request), made + 1
            nodes = growth.frontier(self.tree_width)
        shape = request._replace(max_tokens=made, min_prob=0.0, min_prob_to_continue=0.0)
        drafted = self._head.propose(history, shape) if made else Draft()
        return growth.draft()._replace(made=drafted.made) if drafted.ids else Draft()

    def _add_level(
        self, growth: TreeGrowth, nodes: Sequence[int], right: int, known: int, request: DraftRequest
    ) -> int:
        """Add candidates after these nodes, of which `right` is the one on the text's path. Return the next
        one on it; ROOT: there is none.
        """
        growth.begin_level()
        following = ROOT
        for node in nodes:
            level = len(growth.path(node)) if node != ROOT else 0
            rates = self._rates(level)
            rank = self._rank(rates) if node == right else None
            first = len(growth.ids)
            claims = [max(CLAIM, rate) for rate in rates]
            others = [self._wrong(known, index) for index in range(len(rates))]
            wanted = [known if index == rank else each for index, each in enumerate(others)]
            tokens = [self._drafted(each, request) for each in wanted]
            growth.add(node, list(zip(tokens, claims, strict=True)))
            if rank is not None and first + rank < len(growth.ids):
                following = first + rank
        return following

    def _rates(self, level: int) -> list[float]:
        first = self._agreement(level)
        others = [(1 - first) * share if first else 0.0 for share in OF_THE_REST]
        return [first, *others][: self.tree_width]

    def _rank(self, rates: Sequence[float]) -> int | None:
        """Which of the candidates is right; None: no one."""
        drawn = self._random.random()
        for rank, rate in enumerate(rates):
            drawn -= rate
            if drawn < 0:
                return rank
        return None
