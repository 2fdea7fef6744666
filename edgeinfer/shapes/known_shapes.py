"""The shapes of well-known models by name."""

from dataclasses import replace

from edgeinfer.errors import SettingError
from edgeinfer.model_config.architectures import ARCHITECTURES
from edgeinfer.registry.near_names import nearest
from edgeinfer.shapes.families import gemma4, llama3, ministral3, qwen2, qwen3, qwen35, qwen35_moe
from edgeinfer.shapes.gemma4_layers import Gemma4Layers
from edgeinfer.shapes.hybrid_layers import (
    LatentHeads,
    Mamba2Layers,
    ShortConvolutionLayers,
)
from edgeinfer.shapes.registry_shapes import REGISTRY_SHAPES
from edgeinfer.shapes.shape import Shape

_NEMOTRON = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_OLMOE = Shape(
    "olmoe-7b-a1b", 16, 2048, 1024, 16, 16, 50304, 4096, architecture="olmoe", row_norms=True,
    experts=64, experts_per_token=8,
)  # fmt: skip
_QWEN3_MOE = Shape(
    "qwen3-30b-a3b", 48, 2048, 768, 32, 4, 151936, 40960, head_dim=128, architecture="qwen3moe",
    rope_base=1000000.0, qk_norm=True, experts=128, experts_per_token=8,
)  # fmt: skip
_GLM_FLASH = Shape(
    "glm-4.7-flash", 47, 2048, 1536, 20, 1, 154880, 202752, architecture="deepseek2",
    rope_base=1000000.0, experts=64, experts_per_token=4, shared_expert=1536, expert_bias=True,
    dense_layers=1, dense_feed_forward=10240, latent=LatentHeads(192, 64, 256, 512, 768),
)  # fmt: skip
_GEMMA4_MOE = replace(
    gemma4(
        "gemma4-26b-a4b", 30, 2816, 704, 16, 2, 262144,
        Gemma4Layers(1024, 256, 8, values_from_keys=True),
    ),
    dense_feed_forward=2112, experts=128, experts_per_token=8,
)  # fmt: skip

_ALL = (
    Shape("smollm2-135m", 30, 576, 1536, 9, 3, 49152, 8192, tied=True, rope_base=100000.0),
    qwen2("qwen2.5-0.5b", 24, 896, 4864, 14, 2, tied=True),
    qwen3("qwen3-0.6b", 28, 1024, 3072, 16, tied=True),
    Shape("tinyllama-1.1b", 22, 2048, 5632, 32, 4, 32000, 2048),
    qwen35("qwen3.5-0.8b", 24, 1024, 3584, 8, 2, 16, tied=True),
    Shape(
        "lfm2-1.2b",
        16,
        2048,
        8192,
        32,
        8,
        65536,
        128000,
        architecture="lfm2",
        tied=True,
        rope_base=1000000.0,
        qk_norm=True,
        recurrent=ShortConvolutionLayers((2, 5, 8, 10, 12, 14), 8),
        output_norm="token_embd_norm",
    ),
    llama3("llama-3.2-1b", 16, 2048, 8192, 32, tied=True),
    Shape("granite-1b-a400m", 24, 1024, 512, 16, 8, 49155, 4096, tied=True, experts=32, experts_per_token=8),
    qwen2("qwen2.5-1.5b", 28, 1536, 8960, 12, 2, tied=True),
    qwen2("qwen2.5-3b", 36, 2048, 11008, 16, 2, tied=True),
    llama3("llama-3.2-3b", 28, 3072, 8192, 24, tied=True),
    qwen3("qwen3-4b", 36, 2560, 9728, 32, tied=True),
    _OLMOE,
    _QWEN3_MOE,
    Shape(
        "mamba2-1.3b",
        48,
        2048,
        0,
        0,
        0,
        50288,
        1048576,
        architecture="mamba2",
        tied=True,
        recurrent=Mamba2Layers("M" * 48, 64, 64, 128, 1),
        feed_forward_norm="",
    ),
    qwen35("qwen3.5-4b", 32, 2560, 9216, 16, 4, 32, tied=True),
    qwen35("qwen3.5-9b", 32, 4096, 12288, 16, 4, 32, tied=False),
    qwen35_moe("qwen3.5-35b-a3b", 40, 2048, 512, 16, 32),
    Shape(
        "nemotron-3-nano-30b-a3b",
        52,
        2688,
        1856,
        32,
        2,
        131072,
        262144,
        head_dim=128,
        architecture="nemotron_h_moe",
        experts=128,
        experts_per_token=6,
        shared_expert=3712,
        recurrent=Mamba2Layers(_NEMOTRON, 64, 64, 128, 8, kv_heads=2, feed_forward=1856),
        gated=False,
        expert_bias=True,
        feed_forward_norm="",
    ),
    _GLM_FLASH,
    gemma4(
        "gemma4-e4b", 42, 2560, 10240, 8, 2, 131072, Gemma4Layers(512, 256, 2, own_caches=24, per_layer=256)
    ),
    _GEMMA4_MOE,
    qwen2("qwen2.5-7b", 28, 3584, 18944, 28, 4, tied=False),
    ministral3("ministral-3-8b", 34, 4096, 14336),
    Shape("mistral-7b", 32, 4096, 14336, 32, 8, 32768, 32768, rope_base=1000000.0),
    llama3("llama-3-8b", 32, 4096, 14336, 32, tied=False),
)

MAX_LISTED = 8
WITH_HEAD = "+mtp"
SHAPES = {shape.name: shape for shape in (*_ALL, *REGISTRY_SHAPES)}


def find_shape(name: str) -> Shape:
    """The shape of that name; "NAME:LAYERS" has only the first layers, "NAME+mtp" also a draft head.

    Raises `SettingError`.
    """
    if name.lower().endswith(WITH_HEAD):
        shape = find_shape(name[: -len(WITH_HEAD)])
        if not ARCHITECTURES[shape.architecture].draft_head:
            raise SettingError(f"shape: saw {name!r}, but {shape.architecture} has no known draft head")
        return replace(shape, name=f"{shape.name}{WITH_HEAD}", draft_head=True)
    known, colon, layers = name.lower().partition(":")
    found = SHAPES.get(known)
    if found is None:
        near = nearest(known, SHAPES) or list(SHAPES)[:MAX_LISTED]
        raise SettingError(f"shape: saw {known!r}, wanted one of {len(SHAPES)}, as {', '.join(near)}")
    if not colon:
        return found
    if not layers.isdecimal() or not 0 < int(layers) <= found.layers:
        raise SettingError(f"shape: saw {layers!r} layers of {known}, wanted 1 to {found.layers}")
    return replace(found, name=f"{known}-{int(layers)}-layers", layers=int(layers))
