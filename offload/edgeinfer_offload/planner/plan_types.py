"""What a plan is asked for, and what it says: where every byte lies, and what that costs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from edgeinfer_kernels.layer_cache import CacheType
from edgeinfer_kernels.layer_split import LayerSplit
from edgeinfer_kernels.sizes.cuda_buffers import CHUNK
from edgeinfer_kernels.sizes.model_sizes import NEURON_GROUP, ModelSizes
from edgeinfer_offload.machine.hardware import Machine

Place = Literal["gpu", "cpu", "disk"]
"""disk: the file's memory map, whose pages the system brings and takes as it likes."""
CPU_BATCH = 256
"""Tokens of a prompt that the CPU reads in one step."""
PROMPT = 512
"""Tokens of the prompt whose speed is predicted."""
DRAFT_READS = 4 / 3
"""How often a draft model is read for a token that is kept: four drafts a pass, three tokens come of it."""
LIBRARIES, CUDA_CONTEXT = "loading, then libraries", "CUDA context"
SHARED_ITEMS = (LIBRARIES, CUDA_CONTEXT)
"""What a process takes of a GPU once, however many models lie there."""
DRAFT = "draft model"
"""The item that only tokens which are drafted wait for."""
DRAFT_WEIGHT = 2.0
"""What a second of drafting weighs against one of plain decoding: with a draft, the model itself is read once
for those three tokens, at the price of about one and a half.
"""


@dataclass(frozen=True)
class SparseLayer:
    """Bytes of a feed-forward of which a token reads active neurons only.

    `held` is in memory, by neuron or whole; `predictor` too, and read whole. A token reads `read` of what is
    held, of that `scattered` here and there. What lies by neuron is `in_file` once more, for long steps.
    `activity`: of a token's active neurons, what share is among the first n groups of NEURON_GROUP, n = 0…;
    empty: as many as there are neurons.
    """

    held: int
    read: int
    scattered: int
    predictor: int
    in_file: int
    activity: tuple[float, ...] = ()

    def cold(self, hot: int, neurons: int) -> "SparseLayer":
        """What is left of `neurons` if the first `hot` lie elsewhere, whole groups; the predictor stays."""
        left = 1 - hot / neurons
        active = 1 - self.activity[hot // NEURON_GROUP] if self.activity and hot < neurons else left
        scattered = round(self.scattered * active)
        return SparseLayer(
            round(self.held * left),
            round((self.read - self.scattered) * left) + scattered,
            scattered,
            self.predictor,
            round(self.in_file * left),
        )


@dataclass(frozen=True)
class SparseOptions:
    """The layers that are to be sparse, and the memory that they share: once, and for every thread."""

    layers: Mapping[int, SparseLayer]
    shared_bytes: int
    thread_bytes: int


@dataclass(frozen=True)
class PlanOptions:
    """What a plan has to keep to.

    `device`: "any", or all on the "cpu" or on the "gpu". `vram`, `ram`: bytes at most; None: what is free.
    `repack` False: weights of the CPU stay in the file. `depth`: tokens in the cache where the plan has to be
    fast; None: half of the context. `routing`: for each layer of a mixture how often each expert is used, by
    its number. `sparse`: layers whose part on the CPU is sparse. `draft`: a draft model.
    `changing_experts`: where a layer has some experts on the GPU the CPU has all, if it has room for that, so
    that others may come there while it decodes. What may be given up if nothing fits, in this order:
    `kv_may_shrink` f16 to q8_0 on the GPU; `least_context` a shorter context down to this; `disk` that main
    memory holds all of the CPU's weights: the others stay in the file. A plan's own wishes have `disk` only
    if it came to that.
    """

    context: int
    kv: CacheType = "f16"
    device: Literal["any", "cpu", "gpu"] = "any"
    vram: int | None = None
    ram: int | None = None
    repack: bool = True
    disk: bool = False
    depth: int | None = None
    routing: tuple[tuple[float, ...], ...] | None = None
    sparse: SparseOptions | None = None
    draft: ModelSizes | None = None
    changing_experts: bool = False
    kv_may_shrink: bool = False
    least_context: int | None = None
    batch: int = CPU_BATCH
    chunk: int = CHUNK
    prompt: int = PROMPT

    @property
    def planned_depth(self) -> int:
        return self.context // 2 if self.depth is None else self.depth


@dataclass(frozen=True)
class LayerPlacement:
    """Where one layer's parts lie: what a loader is told.

    Dense: the first `hot_neurons` of `neurons` (in the order of the file) are on the GPU. A mixture: the
    experts numbered in `gpu_experts`, of `experts` in all; its router and shared expert lie where its
    attention does. `rest`: where the other neurons or experts lie, all experts if they are `changing`.
    """

    attention: Place
    kv_cache: Place
    hot_neurons: int = 0
    neurons: int = 0
    gpu_experts: tuple[int, ...] = ()
    experts: int = 0
    rest: Place = "cpu"
    changing: bool = False

    @property
    def division(self) -> LayerSplit:
        """As the two halves of a divided decoder are told."""
        return LayerSplit(self.attention == "gpu", self.hot_neurons, self.gpu_experts, self.changing)

    @property
    def has_some_experts(self) -> bool:
        """Whether some of its experts are on the GPU, and others aren't."""
        return 0 < len(self.gpu_experts) < self.experts

    @property
    def whole_on(self) -> Place | None:
        """The place that holds all of it; None: it is divided."""
        own = self.hot_neurons if self.neurons else len(self.gpu_experts)
        total = self.neurons or self.experts
        places = {
            self.attention,
            self.kv_cache,
            *(["gpu"] if own else []),
            *([self.rest] if own < total else []),
        }
        return self.attention if len(places) == 1 else None


@dataclass(frozen=True)
class PlannedItem:
    """A part of the model and its place. `bound`: what holds it back, "" where it costs nothing."""

    item: str
    device: Place | Literal["link"]
    bytes: int
    ms_per_token: float
    bound: str = ""
    layer: int | None = None
    """Of which layer it is a part."""
    overlapped: bool = False
    """It runs while the other side is at work for longer, or is a draft: a plain token waits for neither."""
    weights_read: int = 0
    """Bytes of weights that decoding a token reads of it, on average."""


@dataclass(frozen=True)
class Prediction:
    """What the plan promises. Seconds of a token with the cache empty, at the plan's depth, and full."""

    seconds_empty: float
    seconds: float
    seconds_full: float
    prompt: int
    prompt_seconds: float
    stream_min_tokens: int | None
    """Tokens from which on weights in main memory are sent to the GPU for a prompt; None: never."""

    @property
    def decode_tokens_per_second(self) -> float:
        return 1 / self.seconds if self.seconds else 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prompt / self.prompt_seconds if self.prompt_seconds else 0.0


@dataclass(frozen=True)
class Repacking:
    """What moving weights into the kernels' layout cost; 0 bytes: they stayed in the file."""

    bytes: int
    seconds: float
    released: bool
    """Whether the file's pages were given back, so that the weights are in memory once."""


@dataclass(frozen=True)
class PlanData:
    """Where everything lies, and what decoding one token from there costs."""

    items: tuple[PlannedItem, ...]
    layers: tuple[LayerPlacement, ...]
    head: Place
    embedding: Place
    draft: Place | None
    machine: Machine
    wishes: PlanOptions
    vram_bytes: int
    """What may be used of the GPU: its free memory, or less if the caller says so; 0 without one."""
    ram_bytes: int
    prediction: Prediction
    steps: tuple[str, ...] = ()
    """What was given up so that it fits, in this order."""
    next_gibibyte: float | None = None
    """Decode tokens per second with one GiB more of GPU memory; None: without a GPU, or all is there."""
    limit_reason: str | None = None
    """Why the next part isn't on the GPU."""
    repacking: Repacking | None = None
    """What it cost to bring the weights there; None before it is done."""

    @property
    def own_gpu_bytes(self) -> int:
        """Bytes of the GPU without those that all models there share."""
        return self.bytes_on("gpu") - sum(item.bytes for item in self.items if item.item in SHARED_ITEMS)

    def bytes_on(self, *places: str) -> int:
        """Bytes in these places."""
        return sum(item.bytes for item in self.items if item.device in places)

    @property
    def nbytes(self) -> int:
        """Bytes in main memory and on the GPU, without what stays in the file."""
        return self.bytes_on("cpu", "gpu")

    @property
    def file_bytes(self) -> int:
        """Bytes that stay in the file's memory map."""
        return self.bytes_on("disk")

    @property
    def file_weight_bytes(self) -> int:
        """Of these, weights that tokens are multiplied with."""
        return sum(item.bytes for item in self.items if item.device == "disk" and item.weights_read)

    @property
    def file_cache_bytes(self) -> int:
        """Main memory that is left for the system to hold them in."""
        return max(0, self.machine.processor.free_bytes - self.bytes_on("cpu"))

    @property
    def rereads_file(self) -> bool:
        """Whether every token waits for the disk, as that isn't enough."""
        return self.file_weight_bytes > self.file_cache_bytes

    @property
    def weight_bytes_per_token(self) -> int:
        """Bytes of weights that decoding one token reads, wherever they lie."""
        return sum(item.weights_read for item in self.items)

    @property
    def ms_per_token(self) -> float:
        """Predicted, with what runs at once counted once."""
        return 1000 * self.prediction.seconds

    @property
    def device(self) -> Place | None:
        """The one place of all layers and the head; None: it is a split plan."""
        places = {self.head, *(layer.whole_on for layer in self.layers)}
        return self.head if places == {self.head} else None

    @property
    def feed_forward_share(self) -> float:
        """How much of the layers' feed-forwards, or of their experts, is on the GPU."""
        shares = [
            len(layer.gpu_experts) / layer.experts if layer.experts else layer.hot_neurons / layer.neurons
            for layer in self.layers
        ]
        return sum(shares) / len(shares)
