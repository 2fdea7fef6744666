"""The native engine: runs tokens through a backend, fills the KV cache, returns logits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.cache_changes import CacheChanges
from edgeinfer.engine.device_sampling import BatchSampling, DeviceSampler
from edgeinfer.engine.draft_verification import DraftVerification
from edgeinfer.engine.guards import DEVICE_FAILURES, UsePermission
from edgeinfer.engine.hidden_states import HiddenObserver, HiddenTap
from edgeinfer.engine.kv_cache import KVCache
from edgeinfer.engine.protocols import Progress, PromptSteps, TokenSampler, all_steps
from edgeinfer.engine.ring_positions import RingPositions
from edgeinfer.errors import ContextOverflowError
from edgeinfer.sampling import Sampler
from edgeinfer.snapshots.spilled_pages import SpillBudget
from edgeinfer_kernels.backend import Backend, BatchPositions, ExpertCounts, HiddenStates
from edgeinfer_kernels.caches.layer_cache import SPARE_POSITIONS, LayerCache
from edgeinfer_kernels.decoder import DecoderSpec
from edgeinfer_kernels.decoder_state import DecoderState, StatePool
from edgeinfer_kernels.draft_loop import DraftedTokens, DraftRequest
from edgeinfer_kernels.lora.weights import ModelLora

RESPONSE_START_TOKENS = 8
"""Maximum number of prompt tokens that begin the response, after the last message."""


class NativeEngine(CacheChanges, DraftVerification):
    """The engine for EdgeInfer's kernels: a decoder on a backend, with its cache.

    `batch`: tokens per prefill step. `positions`: of the cache, if that is more than the `context` of one
    text; the others are for further sequences.
    """

    def __init__(
        self,
        specification: DecoderSpec,
        backend: Backend[Any],
        context: int,
        batch: int,
        bytes_per_token: int = 0,
        largest_context: int = 0,
        check_file: Callable[[], None] | None = None,
        positions: int | None = None,
    ) -> None:
        self.specification = specification
        self.vocabulary_size = specification.vocabulary_size
        self.backend = backend
        rings, padding = RingPositions(specification, context), backend.capabilities.padded_tokens
        self.cache = KVCache(context, backend.state_nbytes, rings, padding)
        self.batch = batch
        self.bytes_per_token = bytes_per_token
        self.largest_context = max(largest_context, context)
        self.positions = positions or context
        self.others: tuple[NativeEngine, ...] = ()
        """Engines of the same weights, with separate states for further sequences."""
        self._joined: Backend[Any] | None = None
        """The backend of steps that all of them share."""
        self._hidden: HiddenTap | None = None
        self._sampler: Sampler | None = None
        self.spill = SpillBudget()
        """As `Engine.spill`."""
        self._use = UsePermission(check_file, is_fork_safe=backend.capabilities.is_fork_safe)
        self.capabilities = can = backend.capabilities
        self._step_tokens = min(max(can.padded_tokens, can.max_step_tokens), batch)
        self._batch_sampling = BatchSampling(backend)

    @property
    def context(self) -> int:
        return self.cache.context

    @property
    def ids(self) -> list[int]:
        return self.cache.ids

    def cached_prefix(self, text: Sequence[int]) -> int:
        """As `Engine.cached_prefix`."""
        return self.cache.cached_prefix(text)

    @property
    def expert_counts(self) -> ExpertCounts:
        """Total token-expert assignments in layers with split experts, and how many of them the CPU
        computed.
        """
        return self.backend.expert_counts

    def _forward(self, ids: Sequence[int]) -> HiddenStates:
        """One step: returns the hidden states after the last layer; the cache then holds the tokens."""
        start = len(self.cache.ids)
        if self.cache.rings is not None:  # an interrupted step may have written some of its positions
            self.cache.rings.extend(start + len(ids))
        with DEVICE_FAILURES:
            x: HiddenStates = self.backend.embed(ids)
            self.backend.forward(x, start)
        self._processed(ids)
        return x

    def _processed(self, ids: Sequence[int]) -> None:
        """The cache holds the tokens of a step now."""
        self.cache.append(ids)
        if self._hidden is not None:
            self._hidden.step(ids, self.cache.ids)

    def hand_out(self, layers: Sequence[int], observer: HiddenObserver) -> None:
        """As `Engine.hand_out`; those of the `others` too."""
        count = len(self.specification.layers)
        for engine in (self, *self.others):
            engine._hidden = HiddenTap(engine.backend, layers, observer, count) if layers else None

    def pause_hidden(self, tokens: int) -> None:
        if self._hidden is not None:
            self._hidden.pause = tokens

    def logits(self, x: HiddenStates) -> npt.NDArray[np.float32]:
        with DEVICE_FAILURES:
            return self.backend.logits(x)

    def _normed(self, x: HiddenStates) -> npt.NDArray[np.float32]:
        with DEVICE_FAILURES:
            return self.backend.final_norm(x)

    def _steps(self, ids: Sequence[int], limit: int | None = None) -> Iterator[HiddenStates]:
        """Process `ids` in steps of at most `limit` tokens."""
        self._check(ids)
        size = min(limit or self.batch, self.batch)
        for first in range(0, len(ids), size):
            yield self._forward(ids[first : first + size])

    def _prompt_steps(self, ids: Sequence[int], limit: int | None) -> Iterator[HiddenStates]:
        """As `_steps`. Of a model with recurrent states a checkpoint is kept after each chunk and before the
        last tokens, which begin the response: the next prompt of a chat shares the tokens before them.
        """
        if not self.specification.is_recurrent or len(ids) <= 2 * RESPONSE_START_TOKENS:
            yield from self._steps(ids, limit)
            return
        for part in (ids[:-RESPONSE_START_TOKENS], ids[-RESPONSE_START_TOKENS:]):
            for x in self._steps(part, limit):
                self.backend.checkpoint()
                yield x

    def _check(self, ids: Sequence[int], more: int = 0) -> None:
        """Raise if `ids` are invalid, or if the cache has no space for them and `more` tokens, which is
        reserved.
        """
        self._use.check()
        if len(ids) + more > self.cache.free:
            raise ContextOverflowError(
                f"{len(self.cache.ids) + len(ids) + more} tokens don't fit the context of {self.context}"
            )
        self._check_ids(ids)
        self.cache.reserve(len(self.cache.ids) + len(ids) + more)

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not ids:
            raise ValueError("no tokens to read")
        if min(ids) < 0 or max(ids) >= self.vocabulary_size:
            wrong = next(i for i in ids if not 0 <= i < self.vocabulary_size)
            raise ValueError(f"token id {wrong}: wanted 0 to {self.vocabulary_size - 1}")

    def append(self, ids: Sequence[int], progress: Progress | None = None) -> npt.NDArray[np.float32]:
        """Process `ids`; return the logits (vocabulary,) after the last of them."""
        if len(ids) == 1 and self.capabilities.max_step_tokens:
            only: npt.NDArray[np.float32] = self._step(ids)[0]
            if progress:
                progress(1, 1)
            return only
        return all_steps(self.prompt_steps(ids), len(ids), progress)

    def prompt_steps(self, ids: Sequence[int], limit: int | None = None) -> PromptSteps:
        """As `Engine.prompt_steps`."""
        done = 0
        for x in self._prompt_steps(ids, limit):
            done += len(x)
            yield done
        return self.last_logits(x)

    def _step(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Process a few tokens in one step; returns the logits after each."""
        self._check(ids)
        with DEVICE_FAILURES:
            logits = self.backend.step_logits(ids, len(self.cache.ids))
        self._processed(ids)
        return logits

    def append_all(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Process `ids`; return the logits (len(ids), vocabulary) after each of them."""
        if len(ids) <= self.capabilities.max_step_tokens:
            return self._step(ids)
        logits = [self.logits(x) for x in self._steps(ids)]
        return logits[0] if len(logits) == 1 else np.concatenate(logits)

    def draft(self, ids: Sequence[int], request: DraftRequest) -> DraftedTokens:
        """Process `ids`, then draft and continue, as `Backend.draft`; updates the cache."""
        self._check(ids, len(request.min_probs))
        with DEVICE_FAILURES:
            drafted = self.backend.draft(ids, len(self.cache.ids), request)
        self.cache.append([*ids, *drafted.ids][: drafted.read])
        return drafted

    def append_batch(self, ids: Sequence[int], positions: BatchPositions) -> npt.NDArray[np.float32]:
        """Process tokens of several sequences that share the cache in one step; logits (len(ids),
        vocabulary).

        The cache's ids don't change: the caller keeps track of the sequences' slots.
        """
        return self.logits(self.forward_batch(ids, positions))

    def append_chunk(self, ids: Sequence[int], start: int, pages: npt.NDArray[np.int64]) -> HiddenStates:
        """Process a chunk of one prompt at positions start… in these pages of the cache; return the hidden
        states after the last layer, valid until the next step.
        """
        positions = np.arange(start, start + len(ids))
        rows = np.broadcast_to(pages, (len(ids), len(pages)))
        return self.forward_batch(ids, BatchPositions(positions, rows))

    def sample_batch(
        self,
        x: HiddenStates,
        rows: Mapping[int, tuple[Sampler, Sequence[int]]],
        following: BatchPositions | None = None,
    ) -> dict[int, int]:
        """As `BatchSampling.sample`, after `forward_batch`."""
        return self._batch_sampling.sample(x, rows, following)

    def last_logits(self, x: HiddenStates) -> npt.NDArray[np.float32]:
        """(vocabulary,): the logits of the last of some hidden states."""
        last: npt.NDArray[np.float32] = self.logits(x if len(x) == 1 else x[-1:])[0]
        return last

    def forward_batch(self, ids: Sequence[int], positions: BatchPositions) -> HiddenStates:
        """As `append_batch`; the hidden states after the last layer, valid until the next step."""
        self._use.check()
        self._check_ids(ids)
        with DEVICE_FAILURES:
            x: HiddenStates = self.backend.embed(ids)
            self.backend.forward_batch(x, positions)
        return x

    def logits_of_layers(self, token: int, position: int, layers: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits (vocabulary,) of one token that runs through the given layers only; the cache's ids don't
        change.

        Keys and values are written at `position`, which must be after the cached tokens.
        """
        self.cache.reserve(position + 1)
        with DEVICE_FAILURES:
            x = self.backend.embed([token])
            self.backend.forward_layers(x, position, layers)
        logits: npt.NDArray[np.float32] = self.logits(x)[0]
        return logits

    def rows(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Process `ids`; return the final hidden states, (len(ids), hidden size) float32, of each."""
        return np.concatenate([self._normed(x) for x in self._steps(ids)])

    def device_sampler(self, sampler: Sampler) -> TokenSampler | None:
        """The backend as the token sampler of a stream, if it supports that."""
        return DeviceSampler.offered(self.backend, self.cache, sampler, self._processed)

    def join(self, pool: StatePool) -> None:
        """Make the other states of a pool, whose first is this engine's, `others`: engines of the same
        weights for further sequences. This one closes them.
        """
        if len(pool.states) == 1:
            return
        self.others = tuple(self.with_state(state) for state in pool.states[1:])
        if self.capabilities.max_joined_tokens:
            self._joined = self.backend.joined(pool)

    def with_state(self, state: DecoderState) -> "NativeEngine":
        return NativeEngine(
            self.specification,
            self.backend.with_state(state),
            self.context,
            self.batch,
            self.bytes_per_token,
            self.largest_context,
            self._use.check_file,
        )

    def set_lora(self, lora: ModelLora) -> None:
        """Use these LoRA adapters, and no others; what this engine and the `others` have cached is dropped.

        Raises `LoraError`: the backend can't use one of them; then the ones before stay.
        """
        self._use.check()
        self.backend.set_lora(lora)
        for each in (self, *self.others):
            each.rewind(0)

    @property
    def has_pages(self) -> bool:
        """Whether several sequences can share its cache in pages."""
        return self.capabilities.max_batch_tokens > 0 and self.cache.rings is None

    @property
    def joins_steps(self) -> bool:
        """Whether a step can take a token of each of this engine and its `others`."""
        return self._joined is not None

    @property
    def can_join(self) -> bool:
        """Whether the next token may be processed by `append_each`."""
        end = len(self.cache.ids)
        return end < self.context and self.backend.is_at(end)

    def append_each(self, engines: Sequence["NativeEngine"], ids: Sequence[int]) -> HiddenStates:
        """Process one token in each of several engines, which are this one and its `others`, in one step;
        the hidden states after the last layer, for `logits`, valid until the next step.
        """
        self._use.check()
        self._check_ids(ids)
        assert self._joined is not None
        every = (self, *self.others)
        starts = [len(engine.ids) for engine in engines]
        for engine, start in zip(engines, starts, strict=True):
            if engine.cache.rings is not None:
                engine.cache.rings.extend(start + 1)
        with DEVICE_FAILURES:
            x: HiddenStates = self._joined.embed(ids)
            self._joined.forward_states(x, starts, [every.index(engine) for engine in engines])
        for engine, token in zip(engines, ids, strict=True):
            engine.cache.append([token])
        return x

    @property
    def parallel(self) -> int:
        """As `Engine.parallel`."""
        fitting = (self.positions + SPARE_POSITIONS) // LayerCache.positions_for(self.context)
        return max(1 + len(self.others), fitting)

    def close(self) -> None:
        """Release the backend's threads and memory; later calls raise an error."""
        for engine in (self, *self.others):
            engine._use.end()
        self.backend.close()
