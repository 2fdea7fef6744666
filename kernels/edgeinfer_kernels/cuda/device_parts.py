"""All device allocations of a decoder, in order; either counted or made."""

from dataclasses import dataclass
from functools import cached_property

import torch

from edgeinfer_kernels.caches.cache_types import CacheType, element_types, has_recent
from edgeinfer_kernels.cuda.blocks import device_module
from edgeinfer_kernels.cuda.compile_target import HAS_HIP
from edgeinfer_kernels.cuda.current_device import current
from edgeinfer_kernels.cuda.decode.sampling import SamplingBuffers
from edgeinfer_kernels.cuda.decode.workspace import Workspace
from edgeinfer_kernels.cuda.device_memory import Arena, Uploader
from edgeinfer_kernels.cuda.draft.target import HeadTarget
from edgeinfer_kernels.cuda.driver import AMD_CAPABILITY
from edgeinfer_kernels.cuda.offload.streamed_layers import StreamedLayers, can_stream
from edgeinfer_kernels.cuda.prefill.prefill import Prefill
from edgeinfer_kernels.cuda.tensor.collective import Collective
from edgeinfer_kernels.cuda.tensor.peer_memory import BUFFERS
from edgeinfer_kernels.cuda.weights.device_model import DeviceModel, OnLoaded, Part
from edgeinfer_kernels.cuda.weights.plane_formats import UnsupportedOnDeviceError
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_kernels.sizes.cuda_buffers import CHUNK, KEPT, MAX_TOKENS, RECENT, REQUEST_SIZE, SLICE
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_kernels.stages import Stage
from edgeinfer_kernels.tensor_parts import TensorPart

MAX_FOUR_BIT_TOKENS = 8
"""Tokens of a text in a step if keys or values have four bits. Of six small models three had other logits on
an H100 with 13 tokens than with 8 and 5: by 0.17 to 0.42 of their norm, more than rounding explains.
"""


@dataclass(frozen=True)
class DeviceOptions:
    """Options for the layout of a decoder on a device."""

    kv: CacheType = "f16"
    """Type of the KV cache."""
    chunk: int = CHUNK
    stages: tuple[Stage, ...] = ()
    """Those of a split model; empty: the whole decoder is on the device."""
    stream_min_tokens: int | None = None
    """Minimum tokens of a prompt for which the CPU's weights are streamed to the GPU; None: never."""
    per_layer_here: bool = False
    """Whether the table of per-layer embeddings is on the device."""
    gathered: tuple[int, ...] = ()
    """Layers whose feed-forward reads only the active neurons in steps, of those on the device."""
    step_tokens: int = MAX_TOKENS
    """Maximum number of tokens of a text that are read as a decode step; more are a chunk of a prompt."""
    sequences: int = 1
    """Sequences with separate recurrent states; the context is that of all."""
    kept_states: int = 0
    """Positions whose hidden states are kept for a draft head; 0: it has none."""
    kept_layers: tuple[int, ...] = ()
    """After how many layers these states are; empty: after the output norm."""
    target: HeadTarget | None = None
    """The target of a draft head."""
    part: TensorPart | None = None
    """Of a rank of tensor parallel."""

    @cached_property
    def longest_step(self) -> int:
        """`step_tokens`, or MAX_FOUR_BIT_TOKENS with a cache in four bits or with recent positions."""
        is_limited = "q4_0" in element_types(self.kv) or has_recent(self.kv)
        most = MAX_FOUR_BIT_TOKENS if is_limited else MAX_TOKENS
        return min(self.step_tokens, most)

    @property
    def tree_tokens(self) -> int:
        """Maximum tokens of a tree; 0: drafts are chains, of several sequences and with recent positions."""
        return self.longest_step if self.sequences == 1 and not has_recent(self.kv) else 0


class SamplingSpace:
    """Buffers for sampling the tokens of a step on the device."""

    def __init__(self, vocabulary: int, arena: Arena) -> None:
        rows, slices = MAX_TOKENS, -(-vocabulary // SLICE)
        self.buffers = SamplingBuffers(
            arena.take((rows, slices, KEPT), torch.int64),
            arena.take((rows, slices), torch.float32),
            arena.take((rows, slices), torch.float32),
            arena.take((rows, slices), torch.int32),
            KEPT,
            SLICE,
        )
        self.requests = arena.take((rows, REQUEST_SIZE), torch.float64)
        self.recent = arena.take((rows, RECENT), torch.int32)
        self.sampled = arena.take((rows,), torch.int32)
        self.results = arena.take((rows, 2), torch.int32)


@dataclass(frozen=True)
class DeviceParts:
    """A decoder's weights and caches, its buffers for steps, prefill and sampling, and those for streamed
    weights.
    """

    model: DeviceModel
    workspace: Workspace
    prefill: Prefill
    sampling: SamplingSpace
    sent: StreamedLayers | None

    @classmethod
    def take(
        cls,
        specification: DecoderSpec,
        weights: DecoderWeights,
        context: int,
        arena: Arena,
        capability: int,
        options: DeviceOptions,
    ) -> "DeviceParts":
        """Allocate everything from the arena; `specification` and `weights` are those of the whole decoder.

        Raises `UnsupportedOnDeviceError`: a matrix without a kernel.
        """
        check_capability(specification, capability)
        stages = options.stages
        model = DeviceModel(
            specification, weights, arena, context,
            kv=options.kv, stages=stages, per_layer_here=options.per_layer_here, gathered=options.gathered,
            sequences=options.sequences, target=options.target, part=options.part,
        )  # fmt: skip
        workspace = Workspace(model, arena, options.kept_states, options.kept_layers)
        sizes = ModelSizes.of(specification, weights)
        prefill = Prefill(model, arena, options.chunk, capability, sizes)
        prefill.kept = workspace.kept
        sampling, sent = SamplingSpace(model.vocabulary, arena), None
        if options.stream_min_tokens is not None and can_stream(specification, stages):
            sent = StreamedLayers(specification, weights, stages, model, arena, options.stream_min_tokens)
            prefill.sent, prefill.products.sender = sent, sent.sender
        return cls(model, workspace, prefill, sampling, sent)

    def fill(self, device: torch.device, on_loaded: OnLoaded | None) -> None:
        """Load the weights onto the device."""
        uploader = Uploader(device)
        try:
            self.model.fill(uploader, on_loaded)
            if self.sent is not None:
                self.sent.fill_vectors()
        finally:
            uploader.close()

    def sum_over_ranks(self, collective: Collective, chunk: int) -> None:
        """The results of blocks are partial sums, which this `collective` adds; `chunk`: maximum tokens of a
        prompt's chunk.
        """
        part = self.model.part
        logits = max(map(len, part.vocabulary)) if part else self.model.vocabulary
        self.workspace.y = collective.shared(self.workspace.y, logits)
        self.prefill.collective = collective
        if len(self.model.blocks) % BUFFERS == 0:
            self.prefill.sums = collective.chunk_sums(chunk, self.model.spec.hidden_size)


def check_capability(spec: DecoderSpec, capability: int) -> None:
    """Raise `UnsupportedOnDeviceError` if a block kind needs a newer GPU; 0: the kernels are interpreted."""
    for index in spec.indices():
        block = spec.residual(index).block
        module = device_module(block.kind)
        oldest = module.oldest_capability(block) if hasattr(module, "oldest_capability") else 0
        if 0 < capability < oldest:
            raise UnsupportedOnDeviceError(
                f"{module.PART} needs compute capability {oldest / 10:.1f}, the GPU has {capability / 10:.1f}"
            )


def compute_capability(device: torch.device) -> int:
    """The compute capability as an integer, such as 90; 0 for a device other than a GPU. AMD's GPUs have that
    of NVIDIA's with the same shared memory.
    """
    if device.type != "cuda":
        return 0
    if HAS_HIP:
        return AMD_CAPABILITY
    major, minor = (int(part) for part in torch.cuda.get_device_capability(device))
    return 10 * major + minor


def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors; 0 for a device other than a GPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def cuda_device(index: int) -> torch.device:
    """The device with this index."""
    return torch.device("cuda", index)


def named_device(name: str) -> torch.device:
    """The device with torch's name, as "cuda:1"."""
    return torch.device(name)


def synchronize(device: torch.device) -> None:
    """Wait for all queued work of the device; without CUDA there is none."""
    if device.type == "cuda":
        torch.cuda.current_stream(device.index).synchronize()


def free_bytes(index: int) -> int:
    """Free bytes of the GPU. Creates a CUDA context if this process has none."""
    with current(cuda_device(index)):
        free, _ = torch.cuda.mem_get_info(index)
    return int(free)


def count_parts(
    specification: DecoderSpec,
    weights: DecoderWeights,
    context: int,
    device: torch.device,
    options: DeviceOptions | None = None,
) -> list[Part]:
    """The device memory of a `CudaBackend`, exact to the byte.

    Raises:
        UnsupportedOnDeviceError: a matrix without a kernel.
    """
    counting = Arena()
    capability = compute_capability(device)
    model = DeviceParts.take(
        specification, weights, context, counting, capability, options or DeviceOptions()
    ).model
    held = sum(part.nbytes for part in model.parts)
    return [*model.parts, Part("workspace", counting.used - held, read=False)]
