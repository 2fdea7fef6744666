"""Live requests whose states are separate, but whose steps are shared: one forward takes a token of each."""

from collections.abc import Sequence

from edgeinfer.engine.kv_cache import shared_prefix
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.engine.protocols import Engine
from edgeinfer.generation.batching.engine_requests import EngineRequests, EngineStart
from edgeinfer.generation.batching.shared_steps import sample_rows
from edgeinfer.generation.decoding import forced_tokens
from edgeinfer.generation.loop import LiveRequest
from edgeinfer.snapshots.engine_snapshots import MIN_SNAPSHOT_TOKENS


def reusable_tokens(engine: Engine, ids: Sequence[int]) -> int:
    """Number of these tokens that an engine's text begins with and that needn't be processed again."""
    return 0 if engine.first_evicted is not None else engine.reusable(shared_prefix(engine.ids, ids))


class JoinedRequests(EngineRequests):
    """Live requests on an engine and its `others`, whose backend computes a token of each in one step.

    A request that has several tokens to process, or whose context is full, makes its step alone. One that
    begins copies the state of another engine that has read more of its prompt, up to a position to which
    that state can be rewound.
    """

    shared_unit = MIN_SNAPSHOT_TOKENS

    def __init__(self, engine: NativeEngine, start: EngineStart) -> None:
        super().__init__(engine, start)
        self._engine = engine

    def decode(self, live: Sequence[LiveRequest], ahead: bool = False) -> None:
        """The next token of each request, by as few forwards as possible."""
        joined = [(each, engine) for each in live if (engine := self._joinable(each)) is not None]
        if len(joined) < 2:
            joined = []
        together = {each for each, _ in joined}
        super().decode([each for each in live if each not in together and not each.ended])
        width = self._engine.capabilities.max_joined_tokens
        for first in range(0, len(joined), width):
            self._advance(joined[first : first + width])

    def _before_begin(self, live: LiveRequest, engine: Engine) -> None:
        if live.sequence.evicted:
            return
        prompt = live.sequence.ids[:-1]
        donor = max(self._engines, key=lambda each: reusable_tokens(each, prompt))
        count = reusable_tokens(donor, prompt)
        if count >= reusable_tokens(engine, prompt) + MIN_SNAPSHOT_TOKENS:
            snapshot = donor.snapshot()
            assert snapshot is not None
            engine.restore(snapshot, count)

    def _joinable(self, live: LiveRequest) -> NativeEngine | None:
        """The engine of a request that has one token to process; forced tokens are appended first."""
        engine, sequence = live.engine, live.sequence
        if not isinstance(engine, NativeEngine):
            return None
        if forced := forced_tokens(sequence, engine.context):
            live.accept(forced)
        is_next = not live.ended and engine.ids == sequence.ids[:-1]
        return engine if is_next and engine.can_join else None

    def _advance(self, joined: Sequence[tuple[LiveRequest, NativeEngine]]) -> None:
        """One step of these requests; an error of the forward ends all of them."""
        try:
            for live, _ in joined:
                live.sequence.sampler.begin()
                live.batched(len(joined))
            engines = [engine for _, engine in joined]
            x = self._engine.append_each(engines, [live.sequence.ids[-1] for live, _ in joined])
            sample_rows(self._engine, x, {row: live for row, (live, _) in enumerate(joined)})
        except Exception as error:
            for live, _ in joined:
                live.fail(error)
