"""The Triton backend: decode steps as captured CUDA graphs, chunked prefill, sampling on the device."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from edgeinfer_kernels.backend import BatchPositions, SamplingSettings
from edgeinfer_kernels.caches.cache_types import element_types
from edgeinfer_kernels.capabilities import Capabilities
from edgeinfer_kernels.cuda.batch_steps import BatchSteps
from edgeinfer_kernels.cuda.cache.device_caches import DeviceCaches
from edgeinfer_kernels.cuda.cache.layout import PAGES, TEXT, Layout, is_chunk, tokens_of_sequence
from edgeinfer_kernels.cuda.cache.sequences import DeviceSequences
from edgeinfer_kernels.cuda.current_device import current, on_device, on_open_device
from edgeinfer_kernels.cuda.decode.captured_steps import CapturedSteps
from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
from edgeinfer_kernels.cuda.decode.device_logits import DeviceLogits, DeviceRows
from edgeinfer_kernels.cuda.decode.device_sampling import DeviceSampling
from edgeinfer_kernels.cuda.decode.sampling import DeviceSamplingParams
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.device_parts import (
    DeviceOptions,
    DeviceParts,
    compute_capability,
    count_parts,
    multiprocessors,
    synchronize,
)
from edgeinfer_kernels.cuda.draft.verification.started_step import StartedVerification
from edgeinfer_kernels.cuda.found_tokens import FoundTokens
from edgeinfer_kernels.cuda.hidden_states import HiddenStatesBackend
from edgeinfer_kernels.cuda.lora import EmbeddingLora, check_adaptable, device_lora
from edgeinfer_kernels.cuda.offload.cpu_stages import DecodeExchange, PrefillExchange
from edgeinfer_kernels.cuda.tensor.collective import Collective
from edgeinfer_kernels.cuda.trees.path_steps import PathSteps
from edgeinfer_kernels.cuda.trees.tree_words import tree_rows
from edgeinfer_kernels.cuda.tuning.step_compiling import OnCompiled
from edgeinfer_kernels.cuda.tuning.step_shapes import Tuning, usual_tuning
from edgeinfer_kernels.cuda.tuning.step_timer import measured_tuning
from edgeinfer_kernels.cuda.tuning.tuner import save_tuning, saved_tuning, tuning_key
from edgeinfer_kernels.cuda.weights.device_model import OnLoaded
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_kernels.lora.shards import shard_lora
from edgeinfer_kernels.lora.weights import ModelLora
from edgeinfer_kernels.sizes.cuda_buffers import (
    ALL_STEP_SIZES,
    COMMON_STEP_SIZES,
    MAX_TOKENS,
    RECENT,
)

DEPENDENT_LAUNCH_FROM = 90
"""Minimum compute capability for programmatic dependent launch: a kernel may start before the previous one
ends.
"""
ON_DEVICE = (
    "_verification",
    "_paths",
    "_batches",
    "_found",
    "_sampling",
    "_caches",
    "_logits",
    "steps",
    "step",
    "_parts",
)
"""Attributes of a backend that refer to the device memory."""


class CudaBackend(HiddenStatesBackend):
    """A decoder on one CUDA device, with its caches. All memory is allocated in the constructor.

    On a device without CUDA (the CPU, in tests) the same kernels are launched one by one.

    With a `part` in the options, it is a rank of tensor parallel: `specification` and `weights` are those of
    `tensor_part`, and the ranks' backends, each with its `collective`, execute the same calls.

    Raises:
        UnsupportedOnDeviceError: a matrix without a kernel.
        DeviceMemoryError: the device has less memory than `count_parts` returns.
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
        collective: Collective | None = None,
    ) -> None:
        self._options = options or DeviceOptions()
        self._collective = collective
        self.spec, self._weights = specification, weights
        self.device = device
        self.batch = self._options.chunk
        self._cuda = device.type == "cuda"
        self._closed = False
        self._others = []
        with current(device):
            self._load(context, tuning, on_loaded)

    def _load(self, context: int, tuning: Tuning | None, on_loaded: OnLoaded | None) -> None:
        """Allocate everything, and load the weights."""
        specification, weights, device = self.spec, self._weights, self.device
        capability = compute_capability(device)
        parts = count_parts(specification, weights, context, device, self._options)
        self._arena = Arena(device, sum(part.nbytes for part in parts))
        try:
            self._parts = DeviceParts.take(
                specification, weights, context, self._arena, capability, self._options
            )
            self._parts.fill(device, on_loaded)
            if self._cuda:
                torch.cuda.empty_cache()
        except BaseException:
            self.close()
            raise
        usual = usual_tuning(capability, specification.hidden_size, multiprocessors(device))
        self._build(tuning or usual, capability)
        self.capabilities = Capabilities(
            max_batch_tokens=self._options.longest_step if self._caches.have_pages else 0,
            max_tree_tokens=self._options.tree_tokens,
            has_recurrent_trees=True,
            padded_tokens=MAX_TOKENS,
            sampling_history=RECENT,
            can_evict=True,
            takes_lora=True,
            text_tokens=self._options.chunk,
            has_separate_states=len(self._sequences.each) > 1,
            max_joined_tokens=self._options.longest_step if len(self._sequences.each) > 1 else 0,
            kept_states=self._options.kept_states,
            finds_best=not self._options.stages,
            starts_verification=self._verification.can_start,
        ).limited_to(specification)

    def _build(self, tuning: Tuning, capability: int) -> None:
        """Build the decode step, what it is captured in, and the buffers on the host."""
        dependent = self._cuda and capability >= DEPENDENT_LAUNCH_FROM
        model, workspace = self._parts.model, self._parts.workspace
        launches = StepLaunches(model, workspace, tuning, dependent=dependent)
        self._parts.prefill.exchange, step_exchange = self._exchanges()
        if self._collective is not None:
            self._parts.sum_over_ranks(self._collective, self.batch)
        self.step = DecodeStep(launches, step_exchange, self._collective)
        slots = model.spec.slots if any(block.residual.block.recurrent for block in model.blocks) else 0
        self._sequences = DeviceSequences(self._options.sequences, model.context, slots)
        self._sequence = self._sequences.each[0]
        self._caches = DeviceCaches(model, self._sequence)
        self.steps = CapturedSteps(self.step, self._parts.sampling, self._sequences)
        self._sampling = DeviceSampling(self.steps, self._parts.sampling, cuda=self._cuda)
        self._ids = torch.zeros(self.batch, dtype=torch.int32, pin_memory=self._cuda)
        self._logits = DeviceLogits(self._parts, self.step, self.device)
        self._found = FoundTokens(self.steps, self._parts.sampling)
        of_sequence = tokens_of_sequence("q4_0" in element_types(self._options.kv))
        self._batches = BatchSteps(self.steps, self._found, self._logits, of_sequence)
        self._verification = StartedVerification(self.steps, self._found, self._sequence, self.discard_ahead)
        self._paths = PathSteps(launches)
        """Keeps the paths of draft trees."""
        self._pending: tuple[int, ...] = ()

    def _exchanges(self) -> tuple[PrefillExchange | None, DecodeExchange | None]:
        """What exchanges hidden states with other shards, in prompts and in steps."""
        return None, None

    @property
    def nbytes(self) -> int:
        """Bytes allocated on the device."""
        return self._arena.used

    def embed(self, ids: Sequence[int]) -> DeviceRows:
        if len(ids) > self.batch:
            raise ValueError(f"{len(ids)} tokens in one step; the backend was loaded for {self.batch}")
        self.check_open()
        self._pending = tuple(ids)
        self._sampling.discard_ahead()
        self._logits.forget()
        return self._rows(len(ids))

    @on_open_device
    def forward(self, x: DeviceRows, start: int) -> None:
        """As `Backend.forward`, for the ids passed to `embed`."""
        self._batches.discard_ahead()
        self._read(self._pending, x, start)

    @on_open_device
    def forward_tree(self, x: DeviceRows, start: int, parents: Sequence[int]) -> None:
        """As `Backend.forward_tree`, for the ids passed to `embed`."""
        self._batches.discard_ahead()
        self._read(self._pending, x, start, tree_rows(parents))

    def tree_end(self, start: int, parents: Sequence[int]) -> int:
        """As `Backend.tree_end`: a row for each token."""
        return start + 1 + len(parents)

    @on_open_device
    def keep_path(self, start: int, parents: Sequence[int], rows: Sequence[int]) -> None:
        """As `Backend.keep_path`."""
        if self._sequence.slots is not None:
            self._sequence.slots.keep_path(len(rows))
        self._paths.keep(start, rows)

    def _read(
        self,
        ids: Sequence[int],
        x: DeviceRows,
        start: int,
        before: Sequence[int] = (),
        pages: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Process the tokens `ids` of one sequence at positions start…, in `pages` (1, pages) if given."""
        self._select()
        own = None if pages is None else pages[0]
        if x.in_step:
            if before or own is not None or not self._verification.take(ids, start):
                self.steps.set_state(ids, start, before, own)
                self.steps.run(len(ids), layout=None if pages is None else PAGES)
            return
        self._send(ids)
        self._parts.prefill.per_layer.send(ids)
        self._parts.prefill.read(len(ids), start, self.steps.set_chunk(start, len(ids), own))
        synchronize(self.device)

    def _select(self) -> None:
        """The next steps and chunks are of this backend's sequence."""
        self.steps.sequence = self._parts.prefill.sequence = self._sequence

    @on_open_device
    def forward_batch(self, x: DeviceRows, positions: BatchPositions) -> None:
        """As `Backend.forward_batch`, for the ids passed to `embed`. With four-bit keys or values the tokens
        of one sequence, other than a chunk of its prompt, are processed one after the other.
        """
        if is_chunk(positions):
            self._batches.discard_ahead()
            self._read(self._pending, x, int(positions.positions[0]), pages=positions.pages[:1])
            return
        if not x.in_step:
            raise ValueError(
                f"saw a batch of {len(x)} tokens, wanted {self._options.longest_step} at most, or a chunk"
            )
        self._batches.forward(self._pending, positions)

    @on_open_device
    def forward_states(self, x: DeviceRows, starts: Sequence[int], states: Sequence[int]) -> None:
        """As `Backend.forward_states`, for the ids passed to `embed`; sums of attention are split otherwise
        than for one sequence.
        """
        self._batches.forward(self._pending, self._sequences.positions(starts, states), states)

    @on_open_device
    def sample_batch(
        self,
        x: DeviceRows,
        requests: Sequence[Sequence[float]],
        recent: Sequence[Sequence[int]],
        following: BatchPositions | None = None,
    ) -> list[int]:
        """As `Backend.sample_batch`; of a batch that took several steps the host samples."""
        if following is None and not any(recent) and self._verification.is_taken:
            return self._verification.tokens(requests)
        return self._batches.sample(requests, recent, following)

    @on_open_device
    def forward_texts(self, x: DeviceRows, lengths: Sequence[int]) -> None:
        """As `Backend.forward_texts`, for the ids passed to `embed`."""
        self._send(self._pending)
        self._parts.prefill.read_texts(lengths)
        synchronize(self.device)

    def _send(self, ids: Sequence[int]) -> None:
        """Send the ids of a chunk."""
        self._ids[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
        self._parts.prefill.ids[: len(ids)].copy_(self._ids[: len(ids)], non_blocking=True)

    @on_open_device
    def set_lora(self, lora: ModelLora) -> None:
        """As `Backend.set_lora`; steps are captured again when they are run."""
        streams, gathers = self._parts.sent is not None, bool(self._options.gathered)
        check_adaptable(lora, streams=streams, gathers=gathers)
        self.discard_ahead()
        model = self._parts.model
        if self._options.stages:
            lora = shard_lora(lora, model.shards, [self._weights.output])
        adapters = device_lora(model, lora, self.device)
        of_embedding = EmbeddingLora.of(lora.embedding, self.device)
        synchronize(self.device)
        self.steps.forget()
        self._parts.prefill.forget()
        model.lora.clear()
        model.lora.update(adapters)
        model.embedding_lora = of_embedding

    def _rows(self, tokens: int) -> DeviceRows:
        return DeviceRows(0, tokens, tokens <= self._options.longest_step and not self.spec.is_encoder)

    def discard_ahead(self) -> None:
        """Discard steps that were started ahead: the cache is about to change."""
        self._sampling.discard_ahead()
        self._batches.discard_ahead()
        self._verification.discard()

    @on_open_device
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
        self._batches.discard_ahead()
        self._select()
        return self._sampling.sample_next(token_id, start, request, recent, next_request, may_run_ahead)

    def sampling_request(self, settings: SamplingSettings, recent: int, uniform: float) -> list[float]:
        """As `Backend.sampling_request`."""
        return DeviceSamplingParams.of(settings).request(recent, uniform)

    @on_open_device
    def logits(self, x: DeviceRows) -> npt.NDArray[np.float32]:
        return self._logits.of(x)

    @on_open_device
    def best_ids(self, ids: Sequence[int], start: int, parents: Sequence[int] = ()) -> list[int]:
        """As `Backend.best_ids`, of at most MAX_TOKENS tokens."""
        self.embed(ids)
        self._batches.discard_ahead()
        self._select()
        if not parents and self._verification.take(ids, start):
            return self._verification.tokens()
        self.steps.set_state(ids, start, tree_rows(parents) if parents else ())
        self.steps.run(len(ids))
        self._found.launch_best(len(ids))
        return self._found.read(len(ids))

    def tune(self, folder: Path, seconds: float) -> None:
        """Tune the tile configs of the step's kernels for this GPU and model: loaded from `folder`, or
        measured now.

        A split model uses the saved results of the whole model, because its step waits for the CPU anyway.
        """
        name = torch.cuda.get_device_name(self.device)
        key = tuning_key(name, self.spec, self._weights, self._options.kv)
        tuning = saved_tuning(folder, key)
        if tuning is None and not self._options.stages:
            with on_device(self.device):
                tuning = measured_tuning(self.step, seconds)
            if tuning is not None:
                self.steps.forget()
                save_tuning(folder, key, tuning)
        if tuning is not None:
            self.step.tuning = tuning

    @on_open_device
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
        if self.spec.is_encoder:
            self.forward_texts(self.embed([0]), [1])
        else:
            self.steps.warm_up(widths, on_compiled, layouts)
            if widths == ALL_STEP_SIZES:
                self.steps.warm_up_drafts()
                if self.capabilities.max_tree_tokens:
                    self._paths.warm_up()

    def close(self) -> None:
        """Free the device memory."""
        with current(self.device):
            for other in self._others:
                other.drop()
            self._free()

    def _free(self) -> None:
        steps = self.__dict__.get("steps")
        if steps is not None and steps.expert_cache is not None:
            steps.expert_cache.close()
        parts = self.__dict__.get("_parts")
        if parts is not None and parts.sent is not None:
            parts.sent.close()
        self.drop()
        self._arena.close()

    def drop(self) -> None:
        """Drop what refers to the device memory; no step is run any more."""
        self._closed = True
        for name in ON_DEVICE:
            self.__dict__.pop(name, None)
