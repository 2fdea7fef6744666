"""How one sequence is decoded: baseline, speculative, with forced tokens, and with context shift.

The strategy is chosen at the start of a request. Baseline decoding uses none of the others.
"""

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.protocols import Engine, TextTokenizer
from edgeinfer.generation.context_shift import ContextShift, shared_with
from edgeinfer.generation.loop import DraftCount, GenerationSequence, SampledToken
from edgeinfer.speculation.draft_costs import MAX_DRAFTED
from edgeinfer.speculation.speculator import Speculator


class Decode(Protocol):
    """How an engine step is made; chosen at the start of a request."""

    def step(self, sequences: Sequence[GenerationSequence]) -> list[list[SampledToken]]:
        """One engine step: the next tokens of each sequence, which its sampler has accepted; none for a
        sequence that has to wait.
        """
        ...


def _is_next(engine: Engine, text: Sequence[int], unprocessed: int = 1) -> bool:
    """Whether the cache holds a text except its last tokens; no other stream has used it then."""
    return len(engine.ids) == len(text) - unprocessed == engine.cached_prefix(text)


class BaselineDecode:
    """One forward per token; it is sampled on the device if that supports the sampling parameters."""

    def __init__(self, engine: Engine, sequence: GenerationSequence) -> None:
        self._engine = engine
        self._device_sampler = engine.device_sampler(sequence.sampler) if sequence.is_plain else None

    def step(self, sequences: Sequence[GenerationSequence]) -> list[list[SampledToken]]:
        (sequence,) = sequences
        return [[self.next(sequence)]]

    def next(self, sequence: GenerationSequence, ahead: bool = True) -> SampledToken:
        """The next token. `ahead`: the token after it is expected to be requested in the same way."""
        ids = sequence.ids
        if not _is_next(self._engine, ids):
            return self.resume(sequence)
        if self._device_sampler is not None:
            token = self._device_sampler.next(ids, ahead)
            if token is not None:
                sequence.sampler.accept(token)
                return SampledToken(token, None)
        sequence.sampler.begin()
        return sequence.sample(self._engine.append(ids[-1:]))

    def resume(self, sequence: GenerationSequence) -> SampledToken:
        """The next token, after all tokens that the cache doesn't hold are processed."""
        ids = sequence.ids
        held = self._engine.reusable(min(shared_with(self._engine, ids, sequence.evicted > 0), len(ids) - 1))
        self._engine.rewind(held)
        sequence.sampler.begin()
        return sequence.sample(self._engine.append(ids[held:]))


class SpeculativeDecode:
    """Draft tokens, verified by one forward; baseline decoding where drafting isn't predicted to pay."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: TextTokenizer,
        sequence: GenerationSequence,
        speculator: Speculator,
        count: DraftCount,
    ) -> None:
        self._engine = engine
        self._baseline = BaselineDecode(engine, sequence)
        self._speculator = speculator
        self._controller = speculator.controller_of(sequence.request.sampling)
        self._end_ids = tokenizer.end_ids
        self._count = count
        engine.pause_hidden(self._controller.cooldown_tokens)

    def step(self, sequences: Sequence[GenerationSequence]) -> list[list[SampledToken]]:
        (sequence,) = sequences
        return [self._next(sequence)]

    def _next(self, sequence: GenerationSequence) -> list[SampledToken]:
        ids, sampler, controller = sequence.ids, sequence.sampler, self._controller
        if not _is_next(self._engine, ids):
            return [self._baseline.resume(sequence)]
        if controller.cooldown_tokens:
            controller.cooldown_tokens -= 1
            self._engine.pause_hidden(controller.cooldown_tokens)
            return [self._baseline.next(sequence, ahead=controller.cooldown_tokens > 0)]
        remaining = sequence.remaining - 1
        if sequence.is_plain and sampler.takes_best:
            tokens = self._speculator.run_cycles(ids, sampler, remaining, self._end_ids, self._count)
            if tokens:
                return tokens
        draft = self._speculator.draft(ids, sampler, remaining)
        if draft.ids:
            return self._speculator.verify(
                draft, ids, sampler, self._end_ids, self._count, needs_logits=not sequence.is_plain
            )
        begin = time.perf_counter()
        # A step that the device starts ahead would delay a draft.
        token = self._baseline.next(sequence, ahead=controller.costs.baselines_due > 1)
        self._speculator.record_baseline(sampler, time.perf_counter() - begin)
        return [token]


def forced_tokens(sequence: GenerationSequence, context: int) -> list[SampledToken]:
    """The next tokens to which the sequence's grammar allows no alternative, as many as fit; the sampler has
    accepted them. None if logprobs are requested, which need the logits after each.
    """
    constraint, tokens = sequence.constraint, list[SampledToken]()
    if constraint is None or sequence.request.logprobs is not None:
        return tokens
    limit = min(sequence.remaining, context - len(sequence.ids))
    while len(tokens) < limit and (forced := constraint.forced()) and sequence.sampler.take(forced[0]):
        tokens.append(SampledToken(forced[0], None, True))
    return tokens


class ForcedDecode:
    """Forced tokens, to which a grammar allows no alternative: appended without a forward, and processed with
    the next token. `together`: maximum tokens per forward.
    """

    def __init__(
        self, engine: Engine, sequence: GenerationSequence, together: int, count: DraftCount
    ) -> None:
        self._engine = engine
        self._baseline = BaselineDecode(engine, sequence)
        self._together = together
        self._count = count
        self._unprocessed = 0
        """Number of ids before the last that the engine hasn't processed."""

    def step(self, sequences: Sequence[GenerationSequence]) -> list[list[SampledToken]]:
        (sequence,) = sequences
        ids = sequence.ids
        held = len(ids) - 1 - self._unprocessed
        is_cached = _is_next(self._engine, ids, 1 + self._unprocessed)
        if forced := forced_tokens(sequence, self._engine.context):
            self._unprocessed += len(forced)
            return [forced]
        self._unprocessed = 0
        if not is_cached:
            return [[self._baseline.resume(sequence)]]
        sequence.sampler.begin()
        return [[sequence.sample(self._process(ids[held:]))]]

    def _process(self, ids: list[int]) -> npt.NDArray[np.float32]:
        """Process the token before the forced ones, and these; the logits after the last of them."""
        for first in range(0, len(ids), self._together):
            part = ids[first : first + self._together]
            logits = self._engine.append(part) if len(part) == 1 else self._engine.append_all(part)[-1]
        if self._together > 1 and len(ids) > 1:
            self._count.add_forced(len(ids) - 1, -(-len(ids) // self._together))
        return logits


class ContextShiftDecode:
    """Evicts tokens from the middle of the cache when the context is full, before another strategy's step."""

    def __init__(self, engine: Engine, policy: ContextShift, decode: Decode) -> None:
        self._engine = engine
        self._policy = policy
        self._decode = decode

    def step(self, sequences: Sequence[GenerationSequence]) -> list[list[SampledToken]]:
        (sequence,) = sequences
        if len(sequence.ids) > self._engine.context:
            kept = self._policy.shorten(self._engine, sequence.ids)
            sequence.shifts += 1
            sequence.evicted += len(sequence.ids) - len(kept)
            sequence.ids = kept
        return self._decode.step(sequences)


def decode_for(
    sequence: GenerationSequence,
    engine: Engine,
    tokenizer: TextTokenizer,
    speculator: Speculator | None,
    count: DraftCount,
    batch_invariant: bool,
) -> Decode:
    """The strategy for one sequence. `batch_invariant`: logits of several tokens processed in one step are
    bit-identical to those processed one by one.
    """
    request = sequence.request
    if sequence.constraint is not None and request.logprobs is None:  # logprobs need the logits after each
        together = 1 + MAX_DRAFTED if batch_invariant or speculator else 1
        return ForcedDecode(engine, sequence, together, count)
    if speculator is not None and sequence.constraint is None:
        return SpeculativeDecode(engine, tokenizer, sequence, speculator, count)
    return BaselineDecode(engine, sequence)
