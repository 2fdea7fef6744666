"""Large random feed-forwards and experts of ReLU families in which a known share of the neurons is active.

The rows before the ReLU are S·Q of rank PLANTED_RANK plus a tenth of noise. A bias for each neuron makes it
active on the given share of normed Gaussian inputs. Activity is independent between tokens and neurons, so
blocks of inactive neurons are as rare as by chance. The other matrices are random blocks, because speed
doesn't depend on them.
"""

from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from edgeinfer.benchmarking.random_blocks import Bytes, RandomBlocks
from edgeinfer.errors import SettingError
from edgeinfer_kernels.blocks.attention import AttentionSpec, AttentionWeights
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.feed_forward import Activation, FeedForwardSpec, FeedForwardWeights
from edgeinfer_kernels.blocks.moe import MoeSpec, MoeWeights
from edgeinfer_kernels.decoder import (
    DecoderSpec,
    DecoderWeights,
    LayerSpec,
    LayerWeights,
    ResidualBlock,
    ResidualWeights,
)
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_quant_formats import block_format, encode

PLANTED_RANK = 64
NOISE = 0.1
HEAD = 32

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PlantedShape:
    """Sizes of a feed-forward, or of the experts of an MoE."""

    name: str
    width: int
    neurons: int
    gated: bool
    experts: int = 0
    experts_per_token: int = 1

    @property
    def elements(self) -> int:
        """Weights of a layer, all experts included."""
        return max(self.experts, 1) * self.neurons * self.width * (3 if self.gated else 2)


PLANTED_SHAPES = (
    PlantedShape("relu-1b", 2048, 5632, True),
    PlantedShape("relu-7b", 4096, 11008, True),
    PlantedShape("relu2-4b", 2560, 18432, False),
    PlantedShape("smallthinker-4b", 1536, 768, True, 32, 4),
    PlantedShape("smallthinker-21b", 2560, 768, True, 64, 6),
    PlantedShape("nemotron3-30b", 2688, 1856, False, 128, 6),
    PlantedShape("smoke", 256, 512, True),
    PlantedShape("smoke-experts", 256, 512, True, 4, 2),
)


def find_planted(name: str) -> PlantedShape:
    """A shape by name. Raises `SettingError`."""
    for shape in PLANTED_SHAPES:
        if shape.name == name:
            return shape
    known = ", ".join(shape.name for shape in PLANTED_SHAPES)
    raise SettingError(f"shape: saw {name!r}, wanted one of {known}")


def planted_decoder(
    shape: PlantedShape, kind: str, layers: int, active: float
) -> tuple[DecoderSpec, DecoderWeights]:
    """A decoder of `layers` equal feed-forwards (or MoE blocks) in the format `kind`; the share `active` of
    their neurons (of the experts in use) is active. One small attention head, a vocabulary of 32.
    """
    random = np.random.default_rng(len(shape.name) + shape.neurons)
    norm = NormSpec("rms", 1e-5)
    attention = AttentionSpec(1, 1, HEAD, HEAD**-0.5, norm, None)
    activation: Activation = "relu" if shape.gated else "relu_squared"
    second: FeedForwardSpec | MoeSpec = FeedForwardSpec(activation, shape.neurons, shape.gated)
    if shape.experts:
        count, used = shape.experts, shape.experts_per_token
        second = MoeSpec(activation, count, used, shape.neurons, "softmax", True, gated=shape.gated)
    blocks = (attention, second)
    layer = LayerSpec(tuple(ResidualBlock(block, norm, "norm") for block in blocks))
    facts = DecoderSpec(shape.width, 32, (layer,) * layers, norm)
    rows, bias = _planted(shape, active, random)
    raw = encode(rows.reshape(-1), kind).reshape(shape.neurons, -1)
    weights = tuple(_layer(shape, kind, raw, bias, random) for _ in range(layers))
    embedding = _random("token_embd", "Q8_0", 32, shape.width, random)
    return facts, DecoderWeights(embedding, embedding, np.ones(shape.width, np.float32), None, weights)


def planted_inputs(shape: PlantedShape, tokens: int, seed: int) -> Floats:
    """Rows of the residual stream, (tokens, width)."""
    return np.random.default_rng(seed).standard_normal((tokens, shape.width)).astype(np.float32)


def normed_inputs(x: Floats) -> Floats:
    """The planted RMSNorm, without weights, of x."""
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(1e-5)))


def _planted(shape: PlantedShape, active: float, random: np.random.Generator) -> tuple[Floats, Floats]:
    """The rows before the ReLU (neurons, width), and the neurons' biases."""
    scale = np.float32(shape.width**-0.5)
    directions = random.standard_normal((PLANTED_RANK, shape.width)).astype(np.float32) * scale
    mixed = random.standard_normal((shape.neurons, PLANTED_RANK)).astype(np.float32) * PLANTED_RANK**-0.5
    noise = random.standard_normal((shape.neurons, shape.width)).astype(np.float32) * (NOISE * scale)
    rows = (mixed @ directions + noise).astype(np.float32)
    return rows, (NormalDist().inv_cdf(active) * np.linalg.norm(rows, axis=1)).astype(np.float32)


def _layer(
    shape: PlantedShape, kind: str, raw: Bytes, bias: Floats, random: np.random.Generator
) -> LayerWeights:
    width = shape.width
    ones = np.ones(width, np.float32)
    second = (_experts if shape.experts else _feed_forward)(shape, kind, raw, bias, random)
    q, k, v = (_random(name, "Q8_0", HEAD, width, random) for name in ("attn_q", "attn_k", "attn_v"))
    attention = AttentionWeights(q, k, v, _random("attn_output", "F16", width, HEAD, random))
    return LayerWeights((ResidualWeights(attention, ones), ResidualWeights(second, ones)))


def _feed_forward(
    shape: PlantedShape, kind: str, raw: Bytes, bias: Floats, random: np.random.Generator
) -> FeedForwardWeights:
    width, neurons = shape.width, shape.neurons
    matrix = Matrix("judged", kind, neurons, width, raw)
    down = _random("ffn_down", kind, width, neurons, random)
    if not shape.gated:
        return FeedForwardWeights(matrix, down, ffn_up_bias=bias)
    up = _random("ffn_up", kind, neurons, width, random)
    return FeedForwardWeights(up, down, matrix, ffn_gate_bias=bias)


def _experts(
    shape: PlantedShape, kind: str, raw: Bytes, bias: Floats, random: np.random.Generator
) -> MoeWeights:
    """Experts with copies of the same planted rows, and a random router."""
    width, neurons, count = shape.width, shape.neurons, shape.experts
    router = random.standard_normal((count, width)).astype(np.float32).view(np.uint8)
    judged = Matrix("judged", kind, neurons, width, np.tile(raw, (count, 1)), count)
    down = replace(_random("ffn_down_exps", kind, count * width, neurons, random), rows=width, experts=count)
    biases = np.tile(bias, count)
    up, gate = judged, None
    if shape.gated:
        stack = _random("ffn_up_exps", kind, count * neurons, width, random)
        up, gate = replace(stack, rows=neurons, experts=count), judged
    return MoeWeights(
        Matrix("ffn_gate_inp", "F32", count, width, router),
        up,
        down,
        gate,
        ffn_up_exps_bias=None if shape.gated else biases,
        ffn_gate_exps_bias=biases if shape.gated else None,
    )


def _random(name: str, kind: str, rows: int, columns: int, random: np.random.Generator) -> Matrix:
    blocks = RandomBlocks(kind, columns**-0.5, random)
    raw = blocks.take(rows * columns // block_format(kind).block_elements).reshape(rows, -1)
    return Matrix(name, kind, rows, columns, raw)
