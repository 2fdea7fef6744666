"""Inputs and outputs of the planner: options, placements, items and costs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from edgeinfer_kernels.caches.cache_types import CacheType, has_recent
from edgeinfer_kernels.caches.recent_pages import RECENT_STEP
from edgeinfer_kernels.lora.sizes import LoraSizes
from edgeinfer_kernels.sizes.cuda_buffers import CHUNK
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_kernels.stages import Device, Stage
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.planner.layer_placement import DeviceName, LayerPlacement, plan_stages
from edgeinfer_offload.planner.roofline import Bound, Roofline, Work
from edgeinfer_offload.planner.sparse_types import SparseOptions

CPU_BATCH = 256
"""Maximum number of prompt tokens in one step on the CPU."""
PROMPT = 512
"""Number of tokens of the prompt whose speed is predicted."""
LIBRARIES, CUDA_CONTEXT = "loading, then libraries", "CUDA context"
SHARED_ITEMS = (LIBRARIES, CUDA_CONTEXT)
"""Items that take GPU memory once per process, independent of the number of models."""
Limit = Literal["memory", "compute", "latency", "disk"]
PlacementName = Literal["gpu", "split", "cpu", "disk"]
READ_AHEAD = "buffers for reading ahead"
"""The item of a plan that reads blocks on disk ahead of a step."""
DRAFT, DRAFT_HEAD = "draft model", "draft head"
DRAFTS = (DRAFT, DRAFT_HEAD)
"""The items that only drafting waits for."""


def cpu_batch(kind: CacheType) -> int:
    """Maximum tokens of a step on the CPU with this KV cache."""
    return RECENT_STEP if has_recent(kind) else CPU_BATCH


def split_batch(kind: CacheType) -> int:
    """Maximum tokens of a step of a split model with this KV cache."""
    return RECENT_STEP if has_recent(kind) else CHUNK


@dataclass(frozen=True)
class PlanOptions:
    """Constraints of a plan.

    - `device`: "any", or everything on the "cpu" or on the "gpu".
    - `vram`, `ram`: maximum bytes; None: all free memory.
    - `repack`: False keeps the CPU's weights memory-mapped.
    - `sequences`: sequences whose states are held at once, each of `context` tokens. `whole_caches`: caches
      of windows hold all positions instead of a ring, so that sequences can share them.
    - `depth`: number of cached tokens for which the plan is optimized; None: half of the context.
    - `routing`: for each MoE layer, the usage probability of each expert, by its number.
    - `sparse`: layers whose CPU part is sparse. `draft`: a draft model. `lora`: adapters.
    - `streamed`: blocks on disk can be read ahead of a step, past the page cache.
    - `expert_cache`: use an expert cache: in a layer with some experts on the GPU, the CPU holds all of
      them if they fit, so that the GPU's can change while decoding.
    - Relaxations if nothing fits, in this order: `kv_may_shrink` (f16 to q8_0 on the GPU), `min_context` (a
      shorter context, down to this), `disk` (some of the CPU's weights stay memory-mapped). The options in a
      plan have `disk` only if it was needed.
    """

    context: int
    sequences: int = 1
    whole_caches: bool = False
    kv: CacheType = "f16"
    device: Literal["any", "cpu", "gpu"] = "any"
    vram: int | None = None
    ram: int | None = None
    repack: bool = True
    disk: bool = False
    streamed: bool = False
    depth: int | None = None
    routing: tuple[tuple[float, ...], ...] | None = None
    sparse: SparseOptions | None = None
    draft: ModelSizes | None = None
    lora: LoraSizes | None = None
    expert_cache: bool = False
    kv_may_shrink: bool = False
    min_context: int | None = None
    batch: int = CPU_BATCH
    chunk: int = CHUNK
    prompt: int = PROMPT

    @property
    def planned_depth(self) -> int:
        return self.context // 2 if self.depth is None else self.depth


@dataclass(frozen=True)
class PlannedItem:
    """A part of the model and its device. `bound`: its limiting factor, "" if it costs no time."""

    item: str
    device: DeviceName
    """Or "link", for time between devices."""
    bytes: int
    ms_per_token: float
    bound: str = ""
    layer: int | None = None
    """Index of its layer."""
    overlapped: bool = False
    """It is overlapped with longer work on the other device, or is drafting: baseline decoding doesn't wait
    for it."""
    weights_read: int = 0
    """Mean bytes of its weights that decoding a token reads."""
    read_bytes: float = 0.0
    """Mean bytes that decoding a token reads: weights or a state."""
    operations: float = 0.0
    """Operations of a token; a multiply-accumulate counts as two."""
    reading_ms: float = 0.0
    """The part of `ms_per_token` spent on reading."""

    @property
    def is_cache(self) -> bool:
        """Whether it is a state that tokens read, not weights."""
        return self.read_bytes > 0 and not self.weights_read

    @property
    def intensity(self) -> float | None:
        """Operations for each byte that is read; None: it reads none."""
        return self.operations / self.read_bytes if self.read_bytes else None

    def limited_by(self, machine: Machine) -> Limit | Literal[""]:
        """What limits it on this machine; "": it costs no time."""
        if not self.bound or self.bound == "disk":
            return "disk" if self.bound else ""
        if not self.reading_ms or not self.bound.endswith("memory"):
            return "memory" if self.bound.endswith("memory") else "latency"
        return self.bound_of(1, machine)

    def bound_of(self, tokens: int, machine: Machine, reads: float | None = None) -> Bound:
        """Whether memory or compute bounds a step of `tokens` tokens, see `milliseconds`."""
        return self.work(tokens, reads).bound(self._roofline(machine))

    def milliseconds(self, tokens: int, machine: Machine, reads: float | None = None) -> float:
        """Milliseconds of a step of `tokens` tokens of different sequences, which reads `reads` times the
        bytes of one token; None: as many times as there are tokens.
        """
        if not self.reading_ms:
            return self.ms_per_token
        seconds = self.work(tokens, reads).seconds(self._roofline(machine))
        return self.ms_per_token - self.reading_ms + 1000 * seconds

    def work(self, tokens: int, reads: float | None = None) -> Work:
        """The work of such a step."""
        return Work(tokens * self.operations, self.read_bytes * (tokens if reads is None else reads))

    def _roofline(self, machine: Machine) -> Roofline:
        """The device with the rate at which it reads this item."""
        on_gpu = self.bound.startswith("GPU") and machine.gpus
        device = machine.gpus[Device.of(self.device).index] if on_gpu else machine.processor
        return Roofline(device.operations_per_second, 1000 * self.read_bytes / self.reading_ms)


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds per token with an empty cache, at the plan's depth, and with a full cache; 0 of an
    encoder, which decodes nothing.
    """

    seconds_empty: float
    seconds: float
    seconds_full: float
    prompt: int
    prompt_seconds: float
    stream_min_tokens: int | None
    """Minimum number of prompt tokens for streaming weights to the GPU; None: never."""

    @property
    def decode_tokens_per_second(self) -> float:
        return 1 / self.seconds if self.seconds else 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prompt / self.prompt_seconds if self.prompt_seconds else 0.0


@dataclass(frozen=True)
class Repacking:
    """Cost of repacking weights into the kernels' layout; 0 bytes: they stayed memory-mapped."""

    bytes: int
    seconds: float
    released: bool
    """Whether the file's pages were released, so that the weights are in memory only once."""


@dataclass(frozen=True)
class PlanData:
    """The placement of all parts, and the cost of decoding one token."""

    items: tuple[PlannedItem, ...]
    layers: tuple[LayerPlacement, ...]
    head: DeviceName
    embedding: DeviceName
    draft: DeviceName | None
    machine: Machine
    options: PlanOptions
    budgets: Mapping[str, int]
    """Device -> usable bytes: what is free, or the caller's lower limit; 0 on a GPU that can't be used."""
    prediction: Prediction
    relaxations: tuple[str, ...] = ()
    """What was relaxed so that it fits, in order."""
    rate_with_one_gib_more: float | None = None
    """Decoded tokens per second with one more GiB of GPU memory; None: no GPU, or all is on it."""
    limit_reason: str | None = None
    """Why the next part isn't on the GPU."""
    repacking: Repacking | None = None
    """Cost of repacking; None before loading."""

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """What each device computes of a token, in order; a function of the placement alone."""
        return plan_stages(self.layers, self.head, self.embedding)

    @property
    def has_gpu_head(self) -> bool:
        """Whether a draft head is on the GPU."""
        draft = self.options.draft
        return self.draft not in (None, "cpu") and draft is not None and draft.is_draft_head

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that compute any part of a token, in the order of their first stages."""
        return tuple(dict.fromkeys(stage.device for stage in self.stages))

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys, values and other states of all sequences."""
        return sum(item.bytes for item in self.items if item.is_cache)

    @property
    def vram_bytes(self) -> int:
        """Usable bytes of GPU memory."""
        return self.budgets["gpu"]

    @property
    def ram_bytes(self) -> int:
        """Usable bytes of main memory."""
        return self.budgets["cpu"]

    @property
    def gpu_names(self) -> list[str]:
        """The GPUs, in the order of the layers."""
        return [name for name in self.budgets if name.startswith("gpu")]

    @property
    def gpu_bytes(self) -> int:
        """Bytes on all GPUs."""
        return self.bytes_on(*self.gpu_names)

    @property
    def own_gpu_bytes(self) -> int:
        """GPU bytes, excluding those that all models of the process share."""
        return self.gpu_bytes - sum(item.bytes for item in self.items if item.item in SHARED_ITEMS)

    def bytes_on(self, *devices: str) -> int:
        """Bytes on these devices."""
        return sum(item.bytes for item in self.items if item.device in devices)

    @property
    def nbytes(self) -> int:
        """Bytes in main memory and on GPUs, excluding disk offload."""
        return self.bytes_on("cpu", *self.gpu_names)

    @property
    def file_bytes(self) -> int:
        """Bytes that stay memory-mapped."""
        return self.bytes_on("disk")

    @property
    def file_weight_bytes(self) -> int:
        """Of `file_bytes`, the weights used in matmuls."""
        return sum(item.bytes for item in self.items if item.device == "disk" and item.weights_read)

    @property
    def file_cache_bytes(self) -> int:
        """Bytes of main memory left for the page cache."""
        return max(0, self.machine.processor.free_bytes - self.bytes_on("cpu"))

    @property
    def rereads_file(self) -> bool:
        """Whether every token waits for the disk, because the page cache is too small."""
        return self.file_weight_bytes > self.file_cache_bytes

    @property
    def reads_ahead(self) -> bool:
        """Whether blocks on disk are read ahead of a step, past the page cache."""
        return any(item.item == READ_AHEAD for item in self.items)

    @property
    def weight_bytes_per_token(self) -> int:
        """Bytes of weights that decoding one token reads, on all devices."""
        return sum(item.weights_read for item in self.items)

    @property
    def ms_per_token(self) -> float:
        """Predicted milliseconds per token; overlapped work is counted once."""
        return 1000 * self.prediction.seconds

    @property
    def device(self) -> DeviceName | None:
        """The only device that computes; None: the plan is split."""
        first, *others = self.devices
        return None if others else first.name

    @property
    def placement(self) -> PlacementName:
        """Where the model runs; "disk": main memory is so small that each token reads from the disk."""
        if self.rereads_file:
            return "disk"
        kinds = {device.kind for device in self.devices}
        return "split" if len(kinds) > 1 else "gpu" if kinds == {"gpu"} else "cpu"

    @property
    def gpu_layers(self) -> int:
        """Number of layers that are wholly on a GPU."""
        return sum((layer.whole_on or "").startswith("gpu") for layer in self.layers)

    @property
    def gpu_weight_share(self) -> float:
        """Share of the weights' bytes on the GPU; experts that are also in main memory count once."""
        on_gpu = total = 0.0
        for item in self.items:
            if not item.weights_read:
                continue
            layer = None if item.layer is None else self.layers[item.layer]
            is_cached = layer is not None and layer.expert_cache and item.weights_read < item.bytes
            once = 1.0
            if layer is not None and is_cached and item.device not in self.gpu_names:
                once -= len(layer.gpu_experts) / layer.experts
            total += once * item.bytes
            on_gpu += item.bytes if item.device in self.gpu_names else 0
        return on_gpu / total if total else 0.0

    @property
    def feed_forward_share(self) -> float:
        """Share of the layers' feed-forwards, or of their experts, on the GPU."""
        shares = [
            len(layer.gpu_experts) / layer.experts if layer.experts else layer.hot_neurons / layer.neurons
            for layer in self.layers
        ]
        return sum(shares) / len(shares)
