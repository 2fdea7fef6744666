"""Sizes of models and machines for the planner's tests, and plans of them: no file, no weight, no GPU."""

from dataclasses import replace

from edgeinfer_kernels.blocks.attention import AttentionSizes, AttentionSpec
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.common.block_sizes import DivisibleSizes
from edgeinfer_kernels.blocks.feed_forward import FeedForwardSizes
from edgeinfer_kernels.blocks.moe import MoeSizes, MoeSpec
from edgeinfer_kernels.matrix import MatrixSize
from edgeinfer_kernels.sizes.model_sizes import LayerSizes, ModelSizes
from edgeinfer_offload.machine.hardware import Graphics, Link, Machine, Processor
from edgeinfer_offload.planner.memory_plan import MemoryPlan
from edgeinfer_offload.planner.plan_types import PlanOptions
from edgeinfer_offload.planner.planner import plan_memory

MIB, GIB = 1 << 20, 1 << 30
PLAN_OPTIONS = PlanOptions(8192)


def feed_forward(width: int, neurons: int, kind: str, down: str | None = None) -> FeedForwardSizes:
    up, gate = (MatrixSize(name, kind, neurons, width) for name in ("ffn_up", "ffn_gate"))
    return FeedForwardSizes(up, MatrixSize("ffn_down", down or kind, width, neurons), gate, (width,))


def layer(
    width: int, heads: int, kv_heads: int, kind: str, second: DivisibleSizes, window: int = 0
) -> LayerSizes:
    head_dim = width // heads
    rows = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    q, k, v = (
        MatrixSize(f"attn_{part}", kind, count, width) for part, count in zip("qkv", rows, strict=True)
    )
    output = MatrixSize("attn_output", kind, width, heads * head_dim)
    spec = AttentionSpec(heads, kv_heads, head_dim, 1.0, NormSpec("rms", 1e-5), None, window=window)
    return LayerSizes((AttentionSizes(spec, q, k, v, output, (width,)), second))


def dense_model(
    layers: int = 32,
    width: int = 4096,
    neurons: int = 14336,
    kind: str = "Q4_K",
    vocabulary: int = 128256,
    window: int = 0,
) -> ModelSizes:
    """A model of Llama-3's architecture; its 8B shape by default."""
    second = feed_forward(width, neurons, kind)
    one = layer(width, width // 128, max(width // 512, 1), kind, second, window)
    head = MatrixSize("output", "Q6_K", vocabulary, width)
    table = MatrixSize("token_embd", kind, vocabulary, width)
    return ModelSizes(width, vocabulary, (one,) * layers, head, table, (width,))


def single_blocks(model: ModelSizes) -> ModelSizes:
    """The same blocks, each as a layer."""
    return replace(model, layers=tuple(LayerSizes((block,)) for block in model.blocks))


def with_shared_caches(model: ModelSizes, own: int) -> ModelSizes:
    """The attention of the layers after the first `own` ones reads the cache of the last of these."""

    def reading(one: LayerSizes) -> LayerSizes:
        attention, *others = one.blocks
        assert isinstance(attention, AttentionSizes)
        spec = replace(attention.spec, source_layer=own - 1)
        return LayerSizes((replace(attention, spec=spec), *others))

    return replace(model, layers=(*model.layers[:own], *map(reading, model.layers[own:])))


def mixed_model() -> ModelSizes:
    """As `dense_model`, every other layer's down projection with more bits, as in mixes of formats."""
    model = dense_model()
    attention, _ = model.layers[0].blocks
    richer = LayerSizes((attention, feed_forward(4096, 14336, "Q4_K", "Q6_K")))
    layers = tuple(richer if index % 2 else layer for index, layer in enumerate(model.layers))
    return replace(model, layers=layers)


def moe_model(layers: int = 48, shared: bool = False, latent: int = 0) -> ModelSizes:
    """A model of Qwen3-30B-A3B's architecture: 128 experts, eight for a token. `latent`: elements of the
    projection that experts read.
    """
    width = 2048
    router = MatrixSize("ffn_gate_inp", "F32", 128, width)
    common = feed_forward(width, 1536, "Q4_K") if shared else None
    spec = MoeSpec("silu", 128, 8, 768, "softmax", normalized=True, latent_size=latent)
    shapes = ((latent, width), (width, latent)) if latent else ()
    latents = tuple(MatrixSize("ffn_latent", "Q4_K", *shape) for shape in shapes)
    expert = feed_forward(latent or width, 768, "Q4_K")
    experts = MoeSizes(spec, expert, router, common, latents=latents)
    one = layer(width, 16, 4, "Q4_K", experts)
    head = MatrixSize("output", "Q6_K", 151936, width)
    return ModelSizes(width, 151936, (one,) * layers, head, MatrixSize("token_embd", "Q4_K", 151936, width))


def laptop(vram: int = 8 * GIB, ram: int = 24 * GIB) -> Machine:
    """8 cores at 50 GB/s, a GPU at 230 GB/s, PCIe 4 x8."""
    link = Link(12e9, 12e9, 4e9, 4e9)
    return Machine(
        Processor("laptop", 8, 32 * GIB, ram, 50e9, 1.2e12),
        (Graphics("laptop GPU", 0, vram, vram, 230e9, 12e12, link, context_bytes=400 << 20),),
    )


def server() -> Machine:
    """An H200 with 16 cores, with measured speeds."""
    return Machine(
        Processor("server", 16, 128 * GIB, 100 * GIB, 134e9, 3e12),
        (Graphics("H200", 0, 140 * GIB, 139 * GIB, 4.55e12, 384e12, Link(55e9, 55e9, 9e9, 16e9)),),
    )


def cpu_only(ram: int = 24 * GIB) -> Machine:
    return replace(laptop(ram=ram), gpus=())


def with_link(machine: Machine, **changes: object) -> Machine:
    """The machine with another link to its GPU."""
    (graphics,) = machine.gpus
    return machine.with_gpu(replace(graphics, link=replace(graphics.link, **changes)))  # type: ignore[arg-type]


def planned(model: ModelSizes, vram: float, **options: object) -> MemoryPlan:
    """On the laptop, with `vram` GiB of its GPU."""
    return plan_memory(model, laptop(), replace(PLAN_OPTIONS, vram=int(vram * GIB), **options))  # type: ignore[arg-type]
