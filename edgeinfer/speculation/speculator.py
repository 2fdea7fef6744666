"""Speculative decoding: a drafter proposes tokens, one forward verifies all, the accepted ones are kept."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy

from edgeinfer.engine.protocols import Engine
from edgeinfer.errors import SettingError
from edgeinfer.generation.loop import DraftCount, SampledToken
from edgeinfer.sampling import Sampler, SamplingParams
from edgeinfer.speculation.cost_measurement import CostMeasurement
from edgeinfer.speculation.draft_controller import DraftController, DraftStats
from edgeinfer.speculation.draft_costs import MAX_DRAFTED, MeasuredCosts
from edgeinfer.speculation.draft_vocabulary import DraftVocabulary
from edgeinfer.speculation.drafter import CycleLimits, Draft, Drafter, DraftRequest, DraftText
from edgeinfer.speculation.last_text import LastText
from edgeinfer.speculation.trees.tree_pass import TreePass
from edgeinfer.speculation.trees.tree_shape import TreePlanner
from edgeinfer.speculation.verification import accepted_path, path_of, verify
from edgeinfer_kernels.draft_loop import DraftCycle

BATCHED = "batched"
KINDS = ("greedy", "seeded", "sampled", BATCHED)
"""Kinds of completions: with sampling a forward costs more, and acceptance is lower. Completions that are
decoded together are one kind."""
MIN_CYCLES = 2
"""Of a run: with one nothing is saved."""


class Speculator:
    """A model with its drafter and draft statistics; shared by all streams of the model."""

    def __init__(self, engine: Engine, drafter: Drafter) -> None:
        self._engine = engine
        self.drafter = drafter
        if drafter.hidden_layers:
            engine.hand_out(drafter.hidden_layers, drafter.observe)
        self.controllers = {kind: DraftController() for kind in KINDS}
        self.planners = {kind: TreePlanner() for kind in KINDS}
        """The shapes of trees."""
        self.vocabularies = {kind: DraftVocabulary(drafter.short_vocabulary) for kind in KINDS}
        for controller in self.controllers.values():
            controller.costs.short = drafter.short_cost
        self.on_close: Callable[[], None] | None = None
        self._drafting: tuple[int, float] | None = None
        """Number of draft tokens made in this step, and the seconds; None: no drafting."""
        self._drafted_after = LastText()

    def on(self, engine: Engine) -> "Speculator":
        """The speculator of another engine of the same weights, with the same drafter and statistics."""
        if engine is self._engine:
            return self
        other = copy(self)
        other._engine = engine
        return other

    def controller_of(self, params: SamplingParams) -> DraftController:
        """The draft controller for these sampling parameters."""
        return self.controllers[self._kind(params)]

    @property
    def _tree_width(self) -> int:
        """How many candidates trees have after a token; 1: drafts are chains."""
        width = self.drafter.tree_width
        return width if width == 1 or TreePass.max_nodes(self._engine) else 1

    @staticmethod
    def _kind(params: SamplingParams) -> str:
        if params.temperature == 0:
            return "greedy"
        return "sampled" if params.seed is None else "seeded"

    @property
    def batched(self) -> DraftController:
        """The draft controller of completions that are decoded together."""
        return self.controllers[BATCHED]

    def propose_each(self, texts: Sequence[DraftText]) -> list[Draft]:
        """Drafts for several texts. Raises `SettingError` as `draft`."""
        drafts = self.drafter.propose_each(texts) if texts else []
        if len(drafts) != len(texts):
            name = self.drafter.name
            raise SettingError(f"draft: {name} made {len(drafts)} drafts for {len(texts)} texts")
        for draft, text in zip(drafts, texts, strict=True):
            self._check(draft, text.request.max_tokens)
        return drafts

    def measure(self) -> MeasuredCosts:
        """Measure forwards and drafts, on an engine with an empty cache, which is empty again afterwards."""
        return CostMeasurement(self._engine, self.drafter, self._tree_width).measure()

    def begin(self, costs: MeasuredCosts, stats: Mapping[str, DraftStats]) -> None:
        """Set the initial costs, and the stored statistics of some kinds of completions."""
        for kind, controller in self.controllers.items():
            controller.costs.begin(costs)
            if kind in stats:
                controller.begin(stats[kind])

    def draft(self, history: Sequence[int], sampler: Sampler, max_tokens: int) -> Draft:
        """Draft tokens after `history` that are predicted to pay, at most `max_tokens`.

        Raises:
            SettingError: the drafter proposed a token that isn't in the vocabulary.
        """
        begin, controller = time.perf_counter(), self.controller_of(sampler.settings)
        self._drafting = None
        limit = min(max_tokens, self._engine.context - len(history) - 1)
        vocabulary = self.vocabularies[self._kind(sampler.settings)].choose(history, controller)
        length = controller.length(limit)
        if not length:
            return Draft()
        request = self._request(length, limit, sampler.settings, vocabulary)
        draft = self.drafter.propose(history, request)
        self._check(draft, request.max_tokens, request.max_nodes)
        # One more token was drafted if none was kept; otherwise this is rare, and its time is added to the
        # others'.
        tokens = max(1, draft.made or draft.depth)
        seconds, unread = time.perf_counter() - begin, self._unread_tokens(history)
        self._drafting = tokens, controller.costs.counted_draft(seconds, tokens, unread)
        return draft

    def _unread_tokens(self, history: Sequence[int]) -> int:
        """How many tokens of a text the drafter may have to process first: all, or those after the last draft
        if that was for the same text.
        """
        following = self._drafted_after.following(history)
        return len(history) if following is None else following

    def _request(self, length: int, limit: int, params: SamplingParams, vocabulary: int) -> DraftRequest:
        """A request for a chain of `length` tokens, or a longer one if the drafter ends it itself; or for a
        tree if the drafter makes some: while drafting isn't known to pay, of at most this many levels.
        `vocabulary`: as of the request.
        """
        controller, width = self.controller_of(params), self._tree_width
        if width == 1:
            if self.drafter.ends_drafts:
                length = controller.longest(length, min(limit, MAX_DRAFTED))
            return DraftRequest(length, params, *controller.min_probs(length), vocabulary=vocabulary)
        levels = limit if controller.is_profitable else length
        planner = self.planners[self._kind(params)]
        costs, acceptance = controller.costs, controller.acceptance
        depth, nodes = planner.shape(costs, acceptance, levels, width, controller.level_shares)
        nodes = min(nodes, TreePass.max_nodes(self._engine))
        min_probs = controller.min_probs(nodes)
        return DraftRequest(depth, params, *min_probs, nodes, planner.sharpness, vocabulary)

    def _check(self, draft: Draft, length: int, nodes: int = 0) -> None:
        """Raise `SettingError` unless a draft has at most `length` levels, and as many tokens or `nodes`."""
        size, most = self._engine.vocabulary_size, nodes or length
        if len(draft.ids) > most:
            raise SettingError(
                f"draft: {self.drafter.name} proposed {len(draft.ids)} tokens, wanted {most} at most"
            )
        if draft.parents:
            self._check_parents(draft, length)
        if draft.ids and not 0 <= min(draft.ids) <= max(draft.ids) < size:
            wrong = next(token for token in draft.ids if not 0 <= token < size)
            raise SettingError(
                f"draft: {self.drafter.name} proposed token id {wrong}, wanted 0 to {size - 1}"
            )

    def _check_parents(self, draft: Draft, length: int) -> None:
        indices = enumerate(draft.parents)
        wrong = [f"parent {parent} of token {index}" for index, parent in indices if not -1 <= parent < index]
        if len(draft.parents) != len(draft.ids):
            wrong = [f"{len(draft.parents)} parents of {len(draft.ids)} tokens"]
        elif not wrong and draft.depth > length:
            wrong = [f"a tree of {draft.depth} levels, not of {length}"]
        if wrong:
            raise SettingError(
                f"draft: {self.drafter.name} proposed {wrong[0]}, wanted a tree as `Draft` describes it"
            )

    def run_cycles(
        self,
        history: Sequence[int],
        sampler: Sampler,
        max_tokens: int,
        end_ids: Collection[int],
        count: DraftCount,
    ) -> list[SampledToken]:
        """Draft after `history` and verify the drafts by the most probable tokens, several times in one call
        without Python in between; the tokens that were found. Nothing is done if the result is empty: a draft
        and its forward take too long for that, or drafting isn't known to pay, or the drafter can't.
        """
        begin, params = time.perf_counter(), sampler.settings
        controller, most = self.controller_of(params), self.drafter.max_cycles(self._engine)
        limit = min(max_tokens, self._engine.context - len(history) - MAX_DRAFTED)
        if limit < 1 or min(most, controller.cycles(0)) < MIN_CYCLES or self._tree_width > 1:
            return []
        vocabulary = self.vocabularies[self._kind(params)].choose(history, controller)
        length = controller.length(limit)
        cycles = min(most, controller.cycles(length))
        if cycles < MIN_CYCLES:
            return []
        request = self._request(length, limit, params, vocabulary)
        found = self.drafter.run_cycles(history, request, CycleLimits(limit, end_ids, cycles))
        if not found:
            return []
        seconds = time.perf_counter() - begin
        return self._verified(found, self._unread_tokens(history), seconds, self._kind(params), count)

    def _verified(
        self, cycles: Sequence[DraftCycle], unread: int, seconds: float, kind: str, count: DraftCount
    ) -> list[SampledToken]:
        """Record the cycles of a run, which took `seconds`, as `draft` and `verify` would; their tokens.
        `unread`: those that the drafter had to process first.
        """
        controller, tokens = self.controllers[kind], []
        spent = sum([each.draft_seconds + each.step_seconds for each in cycles])
        more = max(0.0, seconds - spent) / len(cycles)
        for ids, probs, found, draft_seconds, step_seconds in cycles:
            drafted, right, last = len(ids), len(found) - 1, found[-1]
            is_end = right < drafted and ids[right] == last  # an end token
            accepted, made = right + is_end, max(1, drafted)
            tokens += [SampledToken(token, None, True) for token in found[:-1]]
            tokens.append(SampledToken(last, None, is_end))
            draft_seconds = controller.costs.counted_draft(draft_seconds, made, unread)
            controller.record_step(len(found), 1 + drafted, made, draft_seconds, step_seconds + more)
            missed = self._misses(tokens[-1], kind)
            controller.record_accepted(drafted, accepted, probs, missed=missed)
            if drafted:
                count.add(drafted, accepted, len(found))
            unread = len(found)
        return tokens

    def record_baseline(self, sampler: Sampler, seconds: float) -> None:
        """Record the seconds of a forward without a draft."""
        controller = self.controller_of(sampler.settings)
        if self._drafting is None:
            controller.record_baseline(seconds)
        else:
            controller.record_step(1, 1, *self._drafting, seconds)

    def verify(
        self,
        draft: Draft,
        history: Sequence[int],
        sampler: Sampler,
        end_ids: Collection[int],
        count: DraftCount,
        *,
        needs_logits: bool = True,
    ) -> list[SampledToken]:
        """Process the last token of `history`, whose others are in the cache, and the draft after it.

        Returns the following tokens; the cache then holds the history and these, except the last. Without
        `needs_logits` they may be found on the device, where the logits stay.
        """
        begin = time.perf_counter()
        tree = TreePass.of(self._engine, draft)
        if tree is None:
            draft = draft.chain
        tokens = None if needs_logits else self._found_on_device(draft, tree, history, sampler, end_ids)
        if tokens is None:
            ids = [history[-1], *draft.ids]
            logits = self._engine.append_all(ids) if tree is None else tree.read(history[-1])
            tokens = verify(draft, logits, history, sampler, end_ids)
        if tree is not None:
            tree.keep(history[-1], accepted_path(draft, tokens[:-1]))
        self._engine.rewind(len(history) + len(tokens) - 1)
        # All tokens but the last one are drafted ones, and maybe that one.
        accepted = len(tokens) - 1 + tokens[-1].drafted
        seconds, kind = time.perf_counter() - begin, self._kind(sampler.settings)
        self._record(draft, tokens, accepted, seconds, kind)
        count.add(len(draft.ids), accepted, len(tokens))
        return tokens

    def _found_on_device(
        self,
        draft: Draft,
        tree: TreePass | None,
        history: Sequence[int],
        sampler: Sampler,
        end_ids: Collection[int],
    ) -> list[SampledToken] | None:
        """As `verify`, with the tokens found on the device, where the logits stay. None: it can't find them,
        and nothing is processed.

        A token of a draft that was sampled is accepted by its probability, which the host needs.
        """
        last, found = history[-1], None
        ids = [last, *draft.ids]
        if sampler.takes_best:
            found = self._engine.append_best(ids) if tree is None else tree.best(last)
        elif draft.distributions is None:
            found = self._engine.append_sampled(ids, sampler) if tree is None else tree.sampled(last, sampler)
        if found is None:
            return None
        tokens = path_of(draft, found, None, end_ids)
        if tokens[-1].id < 0:
            self._engine.rewind(len(history) - 1)
            return None
        for token in tokens:
            if sampler.settings.temperature > 0:
                sampler.uniform()
            sampler.accept(token.id)
        return tokens

    def _record(
        self, draft: Draft, tokens: Sequence[SampledToken], accepted: int, seconds: float, kind: str
    ) -> None:
        """Record a forward that took `seconds` and gave `tokens`, with this many `accepted` of a draft."""
        controller = self.controllers[kind]
        controller.record_step(len(tokens), 1 + len(draft.ids), *(self._drafting or (0, 0.0)), seconds)
        if draft.parents:
            self._record_tree(draft, tokens, kind)
        else:
            missed = self._misses(tokens[-1], kind)
            controller.record_accepted(len(draft.ids), accepted, draft.probs, missed=missed)

    def _record_tree(self, draft: Draft, tokens: Sequence[SampledToken], kind: str) -> None:
        """Record which candidates were right after the tokens of the accepted path; the first ones also as
        those of chains.
        """
        planner, node = self.planners[kind], -1
        for level, token in enumerate(tokens):
            offered = draft.children(node)
            if not offered or self._misses(token, kind):
                break
            found = draft.child(node, token.id) if token.drafted else None
            probs = [draft.probs[each] for each in offered] if draft.probs else []
            planner.record(len(offered), None if found is None else offered.index(found), probs)
            self.controllers[kind].record_node(level, accepted=found == offered[0])
            if found is None:
                break
            node = found

    def _misses(self, token: SampledToken, kind: str) -> bool:
        """Whether a token wasn't drafted as it isn't in the short vocabulary."""
        return not token.drafted and self.vocabularies[kind].misses(token.id, self.controllers[kind])

    def close(self) -> None:
        if self.on_close:
            self.on_close()
        self.drafter.close()
