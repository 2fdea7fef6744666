"""The Triton backend: decode steps as captured CUDA graphs, chunked prefill, sampling on the device."""

from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from edgeinfer_kernels.backend import (
    Backend,
    BackendError,
    BatchPositions,
    Capabilities,
    OnHidden,
    SamplingSettings,
    StateArrays,
)
from edgeinfer_kernels.caches.cache_types import element_types
from edgeinfer_kernels.cuda.batch_steps import BatchSteps
from edgeinfer_kernels.cuda.cache.device_caches import DeviceCaches
from edgeinfer_kernels.cuda.cache.layout import PAGES, TEXT, Layout, is_chunk, tokens_of_sequence
from edgeinfer_kernels.cuda.cache.sequences import DeviceSequences
from edgeinfer_kernels.cuda.current_device import current, on_device
from edgeinfer_kernels.cuda.decode.captured_steps import BEST_OF_EACH, CapturedSteps
from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
from edgeinfer_kernels.cuda.decode.device_logits import DeviceLogits, DeviceRows
from edgeinfer_kernels.cuda.decode.device_sampling import DeviceSampling
from edgeinfer_kernels.cuda.decode.sampling import DeviceSamplingParams
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.device_memory import Arena, Uploader
from edgeinfer_kernels.cuda.device_parts import (
    DeviceOptions,
    DeviceParts,
    compute_capability,
    count_parts,
    synchronize,
)
from edgeinfer_kernels.cuda.draft.draft_steps import DraftSteps
from edgeinfer_kernels.cuda.draft.target import HeadTarget
from edgeinfer_kernels.cuda.lora import device_lora
from edgeinfer_kernels.cuda.offload.cpu_stages import DecodeExchange, Host, NoHost, PrefillExchange
from edgeinfer_kernels.cuda.offload.exchange_buffer import ExchangeBuffer
from edgeinfer_kernels.cuda.offload.expert_loading import (
    CountingHost,
    ExpertCache,
    ExpertCacheLayer,
    ExpertPolicy,
)
from edgeinfer_kernels.cuda.offload.streamed_layers import StreamingHost
from edgeinfer_kernels.cuda.tensor.collective import Collective
from edgeinfer_kernels.cuda.trees.path_steps import PathSteps
from edgeinfer_kernels.cuda.trees.tree_words import tree_rows
from edgeinfer_kernels.cuda.tuning.step_compiling import OnCompiled
from edgeinfer_kernels.cuda.tuning.step_shapes import Tuning, usual_tuning
from edgeinfer_kernels.cuda.tuning.step_timer import StepTimer
from edgeinfer_kernels.cuda.tuning.tuner import (
    RejectedCandidateError,
    save_tuning,
    saved_tuning,
    tune,
    tuning_key,
)
from edgeinfer_kernels.cuda.weights.device_model import OnLoaded
from edgeinfer_kernels.cuda.weights.moe_weights import DeviceExperts
from edgeinfer_kernels.decoder import BlockIndex, DecoderSpec, DecoderWeights
from edgeinfer_kernels.decoder_state import DecoderState, StatePool, check_evicted
from edgeinfer_kernels.draft_loop import DraftedTokens, DraftRequest
from edgeinfer_kernels.lora.shards import shard_lora
from edgeinfer_kernels.lora.weights import LoraError, ModelLora
from edgeinfer_kernels.reference.backend import final_norm
from edgeinfer_kernels.sizes.cuda_buffers import (
    ALL_STEP_SIZES,
    COMMON_STEP_SIZES,
    KEPT_STATES,
    MAX_TOKENS,
    RECENT,
)
from edgeinfer_kernels.stages import CPU, GPU, CpuStages, cpu_stages, part_of_block, shards_on

DEPENDENT_LAUNCH_FROM = 90
"""Minimum compute capability for programmatic dependent launch: a kernel may start before the previous one
ends.
"""
ON_DEVICE = ("_drafts", "_paths", "_batches", "_sampling", "_caches", "_logits", "steps", "step", "_parts")
"""Attributes of a backend that refer to the device memory."""


class ServingHost(Host, StreamingHost, CountingHost, Protocol):
    """The CPU shard, as `edgeinfer_kernels.cpu.cpu_shard.CpuShard`."""


class CudaBackend(Backend[DeviceRows]):
    """A decoder on one CUDA device, with its caches. All memory is allocated in the constructor.

    On a device without CUDA (the CPU, in tests) the same kernels are launched one by one.

    With a `part` in the options, it is a rank of tensor parallel: `specification` and `weights` are those of
    `tensor_part`, and the ranks' backends, each with its `collective`, execute the same calls.

    With `stages` in the options, it is the GPU shard of a split model. `serve_with` sets the CPU shard,
    and hidden states are exchanged through the `exchange_buffer`. Steps then start with `enter` and
    `sample_entered`.

    Raises:
        UnsupportedOnDeviceError: a matrix without a kernel.
        DeviceMemoryError: the device has less memory than `count_parts` returns.
        ValueError: the stages aren't those of the CPU and one GPU; see `cpu_stages`.
    """

    name = "cuda"

    def __init__(
        self,
        specification: DecoderSpec,
        weights: DecoderWeights,
        context: int,
        device: torch.device,
        options: DeviceOptions | None = None,
        *,
        tuning: Tuning | None = None,
        on_loaded: OnLoaded | None = None,
        exchange_buffer: ExchangeBuffer | None = None,
        collective: Collective | None = None,
    ) -> None:
        self._options = options or DeviceOptions()
        self._collective = collective
        self.spec, self._weights = specification, weights
        stages = self._options.stages
        cpu = cpu_stages(specification, GPU, stages) if stages else None
        self.device = device
        self.batch = self._options.chunk
        self._cuda = device.type == "cuda"
        self._closed = False
        self._others: list[CudaBackend] = []
        """Backends of the same weights and buffers, for other sequences."""
        with current(device):
            self._load(context, cpu, tuning, on_loaded, exchange_buffer)

    def _load(
        self,
        context: int,
        cpu: CpuStages | None,
        tuning: Tuning | None,
        on_loaded: OnLoaded | None,
        exchange_buffer: ExchangeBuffer | None,
    ) -> None:
        """Allocate everything, and load the weights."""
        specification, weights, device = self.spec, self._weights, self.device
        capability = compute_capability(device)
        parts = count_parts(specification, weights, context, device, self._options)
        self._arena = Arena(device, sum(part.nbytes for part in parts))
        try:
            self._parts = DeviceParts.take(
                specification, weights, context, self._arena, capability, self._options
            )
            self._fill(on_loaded)
            if self._cuda:
                torch.cuda.empty_cache()
        except BaseException:
            self.close()
            raise
        self._exchange_buffer = exchange_buffer
        self._prompt_exchange: PrefillExchange | None = None
        self._server: ServingHost | None = None
        self._build(cpu, tuning or usual_tuning(capability), capability)
        self.capabilities = Capabilities(
            max_batch_tokens=self._options.longest_step if self._caches.have_pages else 0,
            max_tree_tokens=self._options.longest_step if self._options.sequences == 1 else 0,
            has_recurrent_trees=True,
            padded_tokens=MAX_TOKENS,
            sampling_history=RECENT,
            can_evict=True,
            takes_lora=self._collective is None,
            text_tokens=self._options.chunk,
            has_separate_states=len(self._sequences.each) > 1,
            max_joined_tokens=self._options.longest_step if len(self._sequences.each) > 1 else 0,
            max_draft_prompt=0 if self._drafts is None else MAX_TOKENS,
            kept_states=self._options.kept_states,
            finds_best=not self._options.stages,
        ).limited_to(specification)

    def _build(self, stages: CpuStages | None, tuning: Tuning, capability: int) -> None:
        """Build the decode step, what it is captured in, and the buffers on the host."""
        dependent = self._cuda and capability >= DEPENDENT_LAUNCH_FROM
        model, workspace = self._parts.model, self._parts.workspace
        launches, step_exchange = StepLaunches(model, workspace, tuning, dependent=dependent), None
        if stages is not None:
            assert self._exchange_buffer is not None, "a split model has an exchange buffer"
            step_exchange = DecodeExchange(stages, self._exchange_buffer)
            self._prompt_exchange = PrefillExchange(stages, self._exchange_buffer, self.device)
            self._parts.prefill.exchange = self._prompt_exchange
        if self._collective is not None:
            workspace.y = self._collective.shared(workspace.y)
            self._parts.prefill.collective = self._collective
        self.step = DecodeStep(launches, step_exchange, self._collective)
        slots = model.spec.slots if any(block.residual.block.recurrent for block in model.blocks) else 0
        self._sequences = DeviceSequences(self._options.sequences, model.context, slots)
        self._sequence = self._sequences.each[0]
        self._caches = DeviceCaches(model, self._sequence)
        self.steps = CapturedSteps(self.step, self._parts.sampling, self._sequences)
        self._sampling = DeviceSampling(self.steps, self._parts.sampling, cuda=self._cuda)
        self._ids = torch.zeros(self.batch, dtype=torch.int32, pin_memory=self._cuda)
        self._logits = DeviceLogits(self._parts, self.step, self.device)
        self._batches = BatchSteps(
            self.steps,
            self._parts.sampling,
            self._logits,
            tokens_of_sequence("q4_0" in element_types(self._options.kv)),
        )
        self._drafts = DraftSteps(self.steps, self._parts.sampling) if self._options.target else None
        """The draft loop of a draft head."""
        self._paths = PathSteps(launches)
        """Keeps the paths of draft trees."""
        self._pending: tuple[int, ...] = ()

    def _fill(self, on_loaded: OnLoaded | None) -> None:
        """Load the weights onto the device."""
        uploader = Uploader(self.device)
        try:
            self._parts.model.fill(uploader, on_loaded)
            if self._parts.sent is not None:
                self._parts.sent.fill_vectors()
        finally:
            uploader.close()

    @property
    def nbytes(self) -> int:
        """Bytes allocated on the device."""
        return self._arena.used

    def embed(self, ids: Sequence[int]) -> DeviceRows:
        if len(ids) > self.batch:
            raise ValueError(f"{len(ids)} tokens in one step; the backend was loaded for {self.batch}")
        self._check_open()
        self._pending = tuple(ids)
        with on_device(self.device):
            self._sampling.discard_ahead()
            self._logits.forget()
        return self._rows(len(ids))

    def forward(self, x: DeviceRows, start: int) -> None:
        """As `Backend.forward`, for the ids passed to `embed`."""
        with on_device(self.device):
            self._batches.discard_ahead()
            self._read(self._pending, x, start)

    def forward_tree(self, x: DeviceRows, start: int, parents: Sequence[int]) -> None:
        """As `Backend.forward_tree`, for the ids passed to `embed`."""
        with on_device(self.device):
            self._batches.discard_ahead()
            self._read(self._pending, x, start, tree_rows(parents))

    def tree_end(self, start: int, parents: Sequence[int]) -> int:
        """As `Backend.tree_end`: a row for each token."""
        return start + 1 + len(parents)

    def keep_path(self, start: int, parents: Sequence[int], rows: Sequence[int]) -> None:
        """As `Backend.keep_path`."""
        if self._sequence.slots is not None:
            self._sequence.slots.keep_path(len(rows))
        with on_device(self.device):
            self._paths.keep(start, rows)

    def _read(self, ids: Sequence[int], x: DeviceRows, start: int, before: Sequence[int] = ()) -> None:
        self._select()
        if x.in_step:
            self.steps.set_state(ids, start, before)
            self.steps.run(len(ids))
            if self._drafts is not None:  # Its next step may follow before the host reads any logits.
                synchronize(self.device)
            return
        self._send(ids)
        self._parts.prefill.per_layer.send(ids)
        self._parts.prefill.read(len(ids), start, self._chunk_pages(start + len(ids)))
        synchronize(self.device)

    def _chunk_pages(self, end: int) -> torch.Tensor | None:
        """The pages of this backend's sequence for a chunk that ends there; None: it isn't in pages."""
        if self._sequence.layout != PAGES:
            return None
        self.steps.set_pages(self._sequence.pages(end)[None])
        return self._parts.workspace.pages[0]

    def _select(self) -> None:
        """The next steps and chunks are of this backend's sequence."""
        self.steps.sequence = self._parts.prefill.sequence = self._sequence

    def forward_batch(self, x: DeviceRows, positions: BatchPositions) -> None:
        """As `Backend.forward_batch`, for the ids passed to `embed`. With four-bit keys or values the tokens
        of one sequence, other than a chunk of its prompt, are processed one after the other.
        """
        with on_device(self.device):
            if is_chunk(positions):
                self._batches.discard_ahead()
                self._read_chunk(x, int(positions.positions[0]), positions.pages[:1])
                return
            if not x.in_step:
                raise ValueError(
                    f"saw a batch of {len(x)} tokens, wanted {self._options.longest_step} at most, or a chunk"
                )
            self._batches.forward(self._pending, positions)

    @property
    def pool(self) -> StatePool:
        """The states of all sequences; the first is this backend's."""
        return self._sequences.pool

    def with_state(self, state: DecoderState) -> "CudaBackend":
        """As `Backend.with_state`, for a state of the `pool`."""
        other = copy(self)
        other._sequence, other._pending = self._sequences.each[self._sequences.number_of(state)], ()
        other._caches = DeviceCaches(self._parts.model, other._sequence)
        self._others.append(other)
        return other

    def joined(self, pool: StatePool) -> "CudaBackend":
        """As `Backend.joined`, for the `pool`."""
        return self.with_state(pool.states[0])

    def forward_states(self, x: DeviceRows, starts: Sequence[int], states: Sequence[int]) -> None:
        """As `Backend.forward_states`, for the ids passed to `embed`; sums of attention are split otherwise
        than for one sequence.
        """
        with on_device(self.device):
            self._batches.forward(self._pending, self._sequences.positions(starts, states), states)

    def enter_states(
        self,
        ids: Sequence[int],
        starts: Sequence[int],
        states: Sequence[int],
        before: Callable[[Sequence[int], BatchPositions], None],
    ) -> DeviceRows:
        """As `forward_states`, of a split model; `before` as in `enter_batch`."""
        return self.enter_batch(ids, self._sequences.positions(starts, states), before, states)

    def is_at(self, position: int) -> bool:
        """As `Backend.is_at`. A step of this position that was started ahead is dropped: its state is in
        another slot.
        """
        slots = self._caches.slots
        if slots is not None and slots.end == position + 1:
            self._sampling.discard_ahead()
            slots.rewind(position)
        return slots is None or slots.is_next(position)

    def _read_chunk(self, x: DeviceRows, start: int, pages: npt.NDArray[np.int64]) -> None:
        """Process the pending tokens of one sequence at positions start… in its pages (1, pages)."""
        ids = self._pending
        self.steps.set_pages(pages)
        if x.in_step:
            self.steps.set_state(ids, start)
            self.steps.run(len(ids), layout=PAGES)
            return
        self._send(ids)
        self._parts.prefill.per_layer.send(ids)
        self._parts.prefill.read(len(ids), start, self._parts.workspace.pages[0])
        synchronize(self.device)

    def sample_batch(
        self,
        x: DeviceRows,
        requests: Sequence[Sequence[float]],
        recent: Sequence[Sequence[int]],
        following: BatchPositions | None = None,
    ) -> list[int]:
        """As `Backend.sample_batch`; of a batch that took several steps the host samples."""
        with on_device(self.device):
            return self._batches.sample(requests, recent, following)

    def copy_positions(self, source: int, target: int, count: int) -> None:
        with on_device(self.device):
            self._caches.copy(source, target, count)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        with on_device(self.device):
            self._discard_ahead()
            self._caches.copy_pages(sources, targets)

    def read_pages(self, pages: Sequence[int]) -> StateArrays:
        with on_device(self.device):
            return self._caches.read_pages(pages)

    def write_pages(self, pages: Sequence[int], arrays: StateArrays) -> None:
        with on_device(self.device):
            self._discard_ahead()
            self._caches.write_pages(pages, arrays)

    def forward_texts(self, x: DeviceRows, lengths: Sequence[int]) -> None:
        """As `Backend.forward_texts`, for the ids passed to `embed`."""
        with on_device(self.device):
            self._send(self._pending)
            self._parts.prefill.read_texts(lengths)
            synchronize(self.device)

    def _send(self, ids: Sequence[int]) -> None:
        """Send the ids of a chunk."""
        self._ids[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
        self._parts.prefill.ids[: len(ids)].copy_(self._ids[: len(ids)], non_blocking=True)

    def set_lora(self, lora: ModelLora) -> None:
        """As `Backend.set_lora`; steps are captured again when they are run."""
        if self._parts.sent is not None and (lora.matrices or lora.embedding):
            raise LoraError(
                "weights on the CPU are streamed to the GPU for prompts and take no adapter: pass it to load"
            )
        if self._options.gathered and lora.matrices:
            raise LoraError("layers that read active neurons only (sparse) take no adapter")
        with on_device(self.device):
            self._discard_ahead()
            model = self._parts.model
            if self._options.stages:
                lora = shard_lora(lora, model.shards, [self._weights.output])
            adapters = device_lora(model, lora, self.device)
            synchronize(self.device)
            self.steps.forget()
            self._parts.prefill.forget()
            model.lora.clear()
            model.lora.update(adapters)

    def serve_with(self, host: ServingHost, *, meets_in_graph: bool = True) -> int:
        """Set the CPU shard that runs the CPU stages and whose weights are streamed during prefill; return
        how many bytes of these could not be pinned.

        `meets_in_graph`: see `exchange_speed.py`.
        """
        assert self._prompt_exchange is not None, "only a split model has a host"
        self._prompt_exchange.host = self.steps.host = self._server = host
        self.steps.meets_in_graph = self._cuda and meets_in_graph
        with on_device(self.device):
            return self._parts.sent.connect(host) if self._parts.sent else 0

    def begin_at_exchange_buffer(self) -> None:
        """Steps begin with the hidden states that another GPU has put into the exchange buffer."""
        assert self._prompt_exchange is not None, "only a part with stages has an exchange buffer"
        self._prompt_exchange.host = self.steps.host = NoHost()
        self.steps.meets_in_graph = self._cuda

    def observe(self, on_hidden: OnHidden) -> None:
        """Call `on_hidden` with some of the hidden rows of prompts whose weights are streamed."""
        self._parts.prefill.on_hidden = on_hidden

    def start_expert_cache(self, policy: ExpertPolicy) -> str | None:
        """Enable the expert cache with this policy, whose rows are the layers with an expert cache. Return
        None, or the reason why the experts stay fixed.
        """
        assert self._server is not None, "only a split model has an expert cache"
        on_cpu, layers = shards_on(CPU, self._options.stages), []
        for block in self._parts.model.blocks:
            here = block.weights
            if isinstance(here, DeviceExperts) and here.has_expert_cache:
                layer = self._parts.model.layers[block.index.layer]
                whole = self._weights.residual(BlockIndex(layer, block.index.position))
                theirs = part_of_block(whole, on_cpu[layer]).block
                requests = self._server.requests[layer]
                layers.append(ExpertCacheLayer.of(here, theirs, requests, self._server))
        with on_device(self.device):
            self.steps.expert_cache = ExpertCache(layers, policy, self.device)
        return self.steps.expert_cache.ended

    @property
    def changed_experts(self) -> int:
        """Number of experts loaded to the device since the model was loaded."""
        expert_cache = self.steps.expert_cache
        return 0 if expert_cache is None else expert_cache.changes

    def _rows(self, tokens: int) -> DeviceRows:
        return DeviceRows(0, tokens, tokens <= self._options.longest_step and not self.spec.is_encoder)

    def keep_hidden(self, layers: Sequence[int]) -> None:
        """As `Backend.keep_hidden`: only `kept_states` are kept."""
        if layers:
            raise ValueError(
                f"hidden states after {layers[0]} layers: a GPU keeps them only for a draft head"
            )

    def kept_hidden(self, tokens: int) -> list[DeviceRows]:
        return []

    def kept_rows(self, first: int, count: int) -> DeviceRows:
        """As `Backend.kept_rows`."""
        return DeviceRows(first, count, False)

    @property
    def has_table(self) -> bool:
        """Whether the embedding is on the device: a split model has it on the CPU, unless it is the head."""
        return not self._options.stages or self._weights.token_embd is self._weights.output

    def as_target(self, *, embedding: bool, output: bool) -> HeadTarget:
        """This model as the target of a draft head, which reads its embedding, its output, or both."""
        kept, model = self._parts.workspace.kept, self._parts.model
        assert kept is not None, "a target keeps hidden states"
        return HeadTarget(model.embedding if embedding else None, model.head if output else None, kept.rows)

    def set_hidden(self, states: DeviceRows, start: int) -> None:
        """As `Backend.set_hidden`; `states.first` is the position of the first of them in the target's text,
        and the head reads those that the target keeps.
        """
        self._sequence.states_at = (states.first - start) % KEPT_STATES

    def draft(self, ids: Sequence[int], start: int, request: DraftRequest) -> DraftedTokens:
        """As `Backend.draft`; the most probable tokens."""
        assert self._drafts is not None, "only a draft head drafts"
        with on_device(self.device):
            self._check_open()
            self._select()
            return self._drafts.draft(ids, start, request)

    def draft_level(
        self, ids: Sequence[int], start: int, parents: Sequence[int], count: int, power: float
    ) -> list[list[tuple[int, float]]]:
        """As `Backend.draft_level`."""
        assert self._drafts is not None, "only a draft head drafts"
        with on_device(self.device):
            self._check_open()
            self._select()
            return self._drafts.level(ids, start, parents, count, power)

    def enter(
        self,
        ids: Sequence[int],
        start: int,
        pages: npt.NDArray[np.int64] | None = None,
        parents: Sequence[int] = (),
    ) -> DeviceRows:
        """Evaluate the tokens `ids`, whose embeddings are in the exchange buffer, at positions start…,
        through all layers; in the `pages` (1, pages) of their sequence, if given; with `parents` as
        `forward_tree`.
        """
        rows = self._rows(len(ids))
        with on_device(self.device):
            self._check_open()
            self._logits.forget()
            self._select()
            if pages is not None:
                self.steps.set_pages(pages)
            if rows.in_step:
                self.steps.set_state(ids, start, tree_rows(parents) if parents else ())
                self.steps.run(len(ids), layout=None if pages is None else PAGES)
            else:
                self._parts.prefill.per_layer.send(ids)
                given = pages is not None
                held = self._parts.workspace.pages[0] if given else self._chunk_pages(start + len(ids))
                self._parts.prefill.read(len(ids), start, held)
            synchronize(self.device)
        return rows

    def enter_batch(
        self,
        ids: Sequence[int],
        positions: BatchPositions,
        before: Callable[[Sequence[int], BatchPositions], None],
        states: Sequence[int] = (),
    ) -> DeviceRows:
        """As `forward_batch`, of a split model; `before` each step the host embeds its tokens. `states`: the
        numbers of their sequences, if these have separate states.
        """
        with on_device(self.device):
            self._check_open()
            self._logits.forget()
            self._batches.before = before
            self._batches.forward(ids, positions, states)
        return self._rows(len(ids))

    def sample_entered(
        self, token_id: int, start: int, request: Sequence[float] | None, recent: Sequence[int]
    ) -> int:
        """`sample_next` for a split model: the token's embedding is in the exchange buffer."""
        with on_device(self.device):
            self._check_open()
            self._select()
            return self._sampling.sample_entered(token_id, start, request, recent)

    def _discard_ahead(self) -> None:
        """Discard steps that were started ahead: the cache is about to change."""
        self._sampling.discard_ahead()
        self._batches.discard_ahead()

    def _check_open(self) -> None:
        if self._closed:
            raise BackendError("the model has been closed; load it again")

    def sample_next(
        self,
        token_id: int,
        start: int,
        request: Sequence[float] | None = None,
        recent: Sequence[int] = (),
        next_request: Sequence[float] | None = None,
        may_run_ahead: bool = True,
    ) -> int:
        """As `Backend.sample_next`.

        If the device has run ahead, a call with the sampled id at start + 1 continues the running step. The
        logits of such steps stay on the device.
        """
        with on_device(self.device):
            self._check_open()
            self._batches.discard_ahead()
            self._select()
            return self._sampling.sample_next(token_id, start, request, recent, next_request, may_run_ahead)

    def sampling_request(self, settings: SamplingSettings, recent: int, uniform: float) -> list[float]:
        """As `Backend.sampling_request`."""
        return DeviceSamplingParams.of(settings).request(recent, uniform)

    def logits(self, x: DeviceRows) -> npt.NDArray[np.float32]:
        with on_device(self.device):
            return self._logits.of(x)

    def best_ids(self, ids: Sequence[int], start: int, parents: Sequence[int] = ()) -> list[int]:
        """As `Backend.best_ids`, of at most MAX_TOKENS tokens."""
        self.embed(ids)
        with on_device(self.device):
            self._batches.discard_ahead()
            self._select()
            self.steps.set_state(ids, start, tree_rows(parents) if parents else ())
            self.steps.run(len(ids), BEST_OF_EACH)
            return self._batches.results(len(ids))

    def copy_hidden(self, x: DeviceRows, target: torch.Tensor) -> None:
        """Copy hidden states (tokens, hidden_size) to the first rows of `target`, in main memory."""
        with on_device(self.device):
            rows = self._hidden(x)
            target[: len(rows), : rows.shape[1]].copy_(rows, non_blocking=True)
            synchronize(self.device)

    def _hidden(self, x: DeviceRows) -> torch.Tensor:
        held = self._parts.workspace.x if x.in_step else self._parts.prefill.x
        return held[x.first : x.first + x.count, : self.spec.hidden_size]

    def final_norm(self, x: DeviceRows) -> npt.NDArray[np.float32]:
        with on_device(self.device):
            rows = self._hidden(x).cpu().numpy()
        return final_norm(self.spec, self._weights, rows).astype(np.float32)

    @property
    def state_nbytes(self) -> int:
        return self._caches.nbytes

    def snapshot(self, end: int) -> StateArrays:
        """Copies of the keys and values of the first `end` positions, layer by layer."""
        with on_device(self.device):
            self._check_open()
            return self._caches.copies(end)

    def restore(self, arrays: Sequence[npt.NDArray[np.generic]], end: int) -> None:
        with on_device(self.device):
            self._check_open()
            self._caches.put(arrays, end)
            synchronize(self.device)

    def checkpoint(self) -> None:
        if self._caches.slots is not None:
            with on_device(self.device):
                self._caches.slots.checkpoint()

    def rewind(self, length: int) -> int:
        """As `Backend.rewind`; a step that was started ahead is discarded too."""
        if self._caches.slots is None:
            return length
        with on_device(self.device):
            self._discard_ahead()
            return self._caches.slots.rewind(length)

    def reach(self, length: int) -> int:
        if self._caches.slots is None:
            return length
        with on_device(self.device):
            return self._caches.slots.reach(length)

    def evict(self, positions: npt.NDArray[np.int64], end: int) -> None:
        """As `Backend.evict`; a step that was started ahead is discarded too."""
        check_evicted(positions, end)
        with on_device(self.device):
            self._check_open()
            self._discard_ahead()
            self._caches.evict(positions, end)
            synchronize(self.device)

    def tune(self, folder: Path, seconds: float) -> None:
        """Tune the tile configs of the step's kernels for this GPU and model: loaded from `folder`, or
        measured now.

        A split model uses the saved results of the whole model, because its step waits for the CPU anyway.
        """
        name = torch.cuda.get_device_name(self.device)
        key = tuning_key(name, self.spec, self._weights, self._options.kv)
        tuning = saved_tuning(folder, key)
        if tuning is None:
            if self._options.stages:
                return
            try:
                with on_device(self.device):
                    tuning = tune(StepTimer(self.step), self.step.tuning, seconds).tuning
            except RejectedCandidateError:  # Not even the default tile configs can be timed here: keep them.
                return
            self.steps.forget()
            save_tuning(folder, key, tuning)
        self.step.tuning = tuning

    def warm_up(
        self,
        widths: tuple[int, ...] = COMMON_STEP_SIZES,
        on_compiled: OnCompiled | None = None,
        layouts: Sequence[Layout] = (TEXT,),
    ) -> None:
        """Compile and capture steps of these token counts and layouts, so that no completion waits for
        compilation; other counts are padded. The kernels of an encoder are compiled for any count.
        `on_compiled` is called with the number of compiled kernels and the total if this takes long.

        Raises:
            KernelsUnavailableError: Triton has no compiler here.
        """
        with on_device(self.device):
            if self.spec.is_encoder:
                self.forward_texts(self.embed([0]), [1])
            else:
                self.steps.warm_up(widths, on_compiled, layouts)
                if self._drafts is not None:
                    self._drafts.warm_up(widths)
                elif self.capabilities.max_tree_tokens and widths == ALL_STEP_SIZES:
                    self._paths.warm_up()
                    self.steps.warm_up_trees()

    def close(self) -> None:
        """Free the device memory."""
        with current(self.device):
            for other in self._others:
                other._closed = True
                other._drop()
            self._closed = True
            self._free()

    def _free(self) -> None:
        steps = self.__dict__.get("steps")
        if steps is not None and steps.expert_cache is not None:
            steps.expert_cache.close()
        parts = self.__dict__.get("_parts")
        if parts is not None and parts.sent is not None:
            parts.sent.close()
        self._drop()
        self._arena.close()

    def _drop(self) -> None:
        """Drop what refers to the device memory."""
        for name in ON_DEVICE:
            self.__dict__.pop(name, None)
