"""Live requests whose cache can't be shared: each is the text of an engine, and they take turns.

The `others` of an engine are separate states of the same weights (recurrent states, rings). Without them, one
request runs at a time, in order of arrival.
"""

from collections.abc import Collection, Sequence

from edgeinfer.engine.kv_cache import shared_prefix
from edgeinfer.engine.protocols import Engine, TextTokenizer
from edgeinfer.generation.decoding import ContextShiftDecode, Decode, decode_for
from edgeinfer.generation.loop import LiveRequest
from edgeinfer.generation.prefill import rewind_to_shared
from edgeinfer.generation.request import Restore
from edgeinfer.generation.shared_prefix import AlternatingSequences, Sequences
from edgeinfer.snapshots.engine_snapshots import MIN_SNAPSHOT_TOKENS, EngineSnapshots
from edgeinfer.snapshots.memory_store import MemoryStore


class EngineStart:
    """Makes a live request the text of an engine; `tokenizer`, `batch_invariant`: as for `decode_for`."""

    def __init__(self, tokenizer: TextTokenizer, batch_invariant: bool) -> None:
        self._tokenizer, self._batch_invariant = tokenizer, batch_invariant

    @property
    def end_ids(self) -> Collection[int]:
        """The tokens that end a completion."""
        return self._tokenizer.end_ids

    def begin(self, live: LiveRequest, engine: Engine, idle: EngineSnapshots | None = None) -> None:
        """Keep what the engine's cache shares with the request's tokens; its next step reads the others.

        `idle`: texts that the engine held before. Raises the errors of `check_prompt`.
        """
        sequence, shift = live.sequence, live.request.context_shift
        if shift is not None and not live.has_begun:
            sequence.ids = shift.begin(engine, live.request.prompt_ids)
            sequence.evicted = len(live.request.prompt_ids) - len(sequence.ids)
        restores = [idle.restore if idle is not None else None, live.request.restore]
        held = rewind_to_shared(engine, sequence.ids, _in_order(restores), sequence.evicted > 0)
        live.start(held)
        self.join(live, engine)

    def join(self, live: LiveRequest, engine: Engine) -> None:
        """The request is the engine's text from now on."""
        live.engine = engine
        speculator = live.speculator.on(engine) if live.speculator is not None else None
        decode: Decode = decode_for(
            live.sequence, engine, self._tokenizer, speculator, live.drafts, self._batch_invariant
        )
        if live.request.context_shift is not None:
            decode = ContextShiftDecode(engine, live.request.context_shift, decode)
        live.decode = decode


def _in_order(restores: Sequence[Restore | None]) -> Restore:
    """A function that restores from several prompt caches, one after the other."""

    def restore(ids: list[int], held: int) -> int:
        for each in restores:
            held = held if each is None else each(ids, held)
        return held

    return restore


class EngineRequests:
    """Live requests on an engine and its `others`; those that find no free one wait.

    If the engine allows it, a text that makes place for another one is kept in main memory.
    """

    shared_unit = 0

    def __init__(self, engine: Engine, start: EngineStart) -> None:
        self._engines = [engine, *engine.others]
        self._holders: list[LiveRequest | None] = [None] * len(self._engines)
        self._used = [0] * len(self._engines)
        """When each was in use last, as a number of a clock."""
        self._clock = 0
        self._start = start
        store = MemoryStore(engine.spill.ram) if engine.spill.ram else None
        self._idle = [None if store is None else EngineSnapshots(each, store) for each in self._engines]

    @property
    def places(self) -> int:
        """Number of sequences that can advance together."""
        return len(self._engines)

    def has_place(self, live: LiveRequest) -> bool:
        """Whether it has an engine, or there is one for it."""
        return live.engine is not None or any(held is None or not held.advances for held in self._holders)

    def alone(self, live: LiveRequest, limit: int | None = None) -> None:
        """One step of the only live request."""
        if self._place(live, [live]):
            live.engine_step(limit)

    def read(self, live: LiveRequest, limit: int, others: Sequence[LiveRequest]) -> None:
        """Read a chunk of the request's tokens; `others` are advanced in the same step."""
        if self._place(live, [live, *others]):
            live.engine_step(limit)

    def decode(self, live: Sequence[LiveRequest], ahead: bool = False) -> None:
        """The next tokens of each request, one after the other."""
        for each in live:
            if each.engine is None:
                each.phase = "reading"
                continue
            try:
                each.engine_step()
            except Exception as error:
                each.fail(error)

    def release(self, live: LiveRequest) -> None:
        """The request has ended; its text stays in the cache."""
        if live in self._holders:
            self._holders[self._holders.index(live)] = None
        live.leave_engine()

    def sequences(self) -> Sequences:
        """As `Requests.sequences`: the first engine holds one at a time."""
        return AlternatingSequences(self._engines[0])

    def suspend(self) -> None:
        """The first engine is about to be used otherwise: its request reads its tokens again."""

    def _place(self, live: LiveRequest, wanted: Sequence[LiveRequest]) -> bool:
        """Whether the request has an engine, possibly that of one that doesn't advance now."""
        self._clock += 1
        if live.engine is not None:
            self._used[self._holders.index(live)] = self._clock
            return True
        usable = [index for index, held in enumerate(self._holders) if held is None]
        usable = usable or [index for index, held in enumerate(self._holders) if held not in wanted]
        if not usable:
            return False
        index = self._best(live, usable)
        holder = self._holders[index]
        if holder is not None:
            holder.leave_engine()
        self._holders[index], self._used[index] = live, self._clock
        engine, idle = self._engines[index], self._idle[index]
        lost = len(engine.ids) - shared_prefix(engine.ids, live.sequence.ids)
        if idle is not None and lost >= MIN_SNAPSHOT_TOKENS:
            idle.keep()
        self._before_begin(live, engine)
        self._start.begin(live, engine, idle)
        return True

    def _before_begin(self, live: LiveRequest, engine: Engine) -> None:
        """The request is about to become the engine's text."""

    def _best(self, live: LiveRequest, usable: Sequence[int]) -> int:
        """The engine whose text the request continues, else the one that was used least recently."""
        ids = live.sequence.ids
        shared = {index: shared_prefix(self._engines[index].text, ids) for index in usable}
        best = max(usable, key=shared.__getitem__)
        if 2 * shared[best] > len(self._engines[best].text):
            return best
        return min(usable, key=self._used.__getitem__)
