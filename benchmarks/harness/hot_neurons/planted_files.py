"""Files of ReLU models in real shapes, in which a known and skewed share of the neurons is active.

The rows before the ReLU are S·Q of rank PLANTED_RANK plus a tenth of noise, the same in each layer. A bias
for each neuron, the hottest first, makes it active on its share of normed Gaussian inputs; experts have the
same rows and biases. Embeddings are
large against the output of the layers, so that the inputs of all layers are such inputs. The other matrices
are random blocks. llama.cpp loads the files: `relu2-7b` as it is; in `relu-7b` it ignores the name of the
activation and computes SiLU, which takes it the same time.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.benchmarking.random_blocks import RandomBlocks
from edgeinfer.benchmarking.random_files import EMBEDDED, EMBEDDING, metadata
from edgeinfer.errors import SettingError
from edgeinfer.profiling.predictor_training import TrainedPredictor, calibrated, predictor_arrays
from edgeinfer.shapes.headers import matrix_formats
from edgeinfer.shapes.shape import Shape
from edgeinfer_offload.runtime.activity_profile import (
    EXPERT_NEURONS,
    ActivityProfile,
    adjacent_profile_path,
    model_hash,
)
from edgeinfer_quant_formats import GGUFFile, GGUFWriter, decode, encode

PLANTED_RANK = 64
NOISE = 0.1
HOT_SHARE, HOT_COVER = 0.26, 0.8
"""The hottest 26 % of the neurons have 80 % of the activations (PowerInfer §2, OPT-30B and LLaMA-ReGLU)."""
MAX_PROB = 0.98
TOKENS = 1024
"""Inputs on which activity is counted and the predictor is calibrated."""

Floats = npt.NDArray[np.float32]


def _shape(name: str, layers: int, width: int, neurons: int, heads: int, vocabulary: int) -> Shape:
    """A gated one is a Llama with ReLU (ReluLLaMA, ProSparse), one without a gate a Nemotron."""
    gated = name.startswith("relu-")
    extra = ("hidden_activation", "relu") if gated else ("attention.layer_norm_epsilon", 1e-5)
    return Shape(
        name,
        layers,
        width,
        neurons,
        heads,
        heads,
        vocabulary,
        4096,
        architecture="llama" if gated else "nemotron",
        keys=(extra,),
        gated=gated,
    )


def _experts(
    name: str, layers: int, width: int, neurons: int, heads: int, experts: int, used: int, vocabulary: int
) -> Shape:
    """Of a SmallThinker, with `used` experts per token; `moe-2b` is half the layers of its 4B."""
    return Shape(
        name,
        layers,
        width,
        neurons,
        heads,
        heads // 4,
        vocabulary,
        4096,
        architecture="smallthinker",
        experts=experts,
        experts_per_token=used,
        keys=(("expert_gating_func", 2), ("attention.sliding_window", 4096)),
    )


PLANTED_MODELS = {
    shape.name: shape
    for shape in (
        _shape("relu-7b", 32, 4096, 11008, 32, 32000),
        _shape("relu2-7b", 32, 4096, 16384, 32, 32000),
        _shape("relu-1b", 22, 2048, 5632, 32, 32000),
        _shape("relu2-1b", 22, 2048, 8192, 32, 32000),
        _shape("relu-smoke", 2, 512, 1536, 8, 512),
        _shape("relu2-smoke", 2, 512, 2048, 8, 512),
        _experts("moe-2b", 16, 1536, 768, 12, 32, 4, 32000),
        _experts("moe-smoke", 2, 512, 256, 8, 4, 2, 512),
    )
}


def find_planted_model(name: str) -> Shape:
    """A shape by name. Raises `SettingError`."""
    if name not in PLANTED_MODELS:
        raise SettingError(f"--shapes: saw {name!r}, wanted one of {', '.join(PLANTED_MODELS)}")
    return PLANTED_MODELS[name]


def neuron_probs(neurons: int, active: float, cover: float = HOT_COVER) -> Floats:
    """The share of tokens that activate each neuron, hottest first: the mean is `active`, and the hottest
    HOT_SHARE have `cover` of the activations, as far as none of them can be active more than always.
    """
    power = math.log(1 - cover) / math.log(1 - HOT_SHARE)
    rank = (np.arange(neurons) + 0.5) / neurons
    probs = active * power * (1 - rank) ** (power - 1)
    for _ in range(8):
        probs = np.minimum(probs, MAX_PROB)
        probs[probs < MAX_PROB] *= (active * neurons - MAX_PROB * (probs >= MAX_PROB).sum()) / probs[
            probs < MAX_PROB
        ].sum()
    return np.clip(probs, 1e-5, MAX_PROB).astype(np.float32)


@dataclass(frozen=True)
class PlantedFile:
    """A file, and the factors of the rows before its ReLU."""

    path: Path
    shape: Shape
    first: Floats
    """Q: (PLANTED_RANK, width)."""
    second: Floats
    """S: (neurons, PLANTED_RANK)."""
    rows: Floats
    """The dequantized rows, (neurons, width)."""

    def plant(self, active: float, cover: float = HOT_COVER, seed: int = 5) -> TrainedPredictor:
        """Give the neurons biases for a mean activity, and write a profile with counts and predictors."""
        bias = self._bias(active, cover)
        self._write_biases(bias)
        x = np.random.default_rng(seed).standard_normal((TOKENS, self.shape.width)).astype(np.float32)
        x /= np.sqrt(np.mean(x * x, axis=1, keepdims=True))
        target = x @ self.rows.T
        is_active = target + bias > 0
        half, part = TOKENS // 2, slice(TOKENS // 2, TOKENS * 3 // 4)
        last = slice(TOKENS * 3 // 4, TOKENS)
        trained = calibrated(
            self.first, self.second, bias, (x[:half], target[:half]),
            (x[part], is_active[part]), (x[last], is_active[last]),
        )  # fmt: skip
        counts = np.stack([is_active[:half].sum(0), is_active[half:].sum(0)]).astype(np.uint32)
        layers, experts = range(self.shape.layers), self.shape.experts
        name, arrays = "neurons", {}
        if experts:
            name = EXPERT_NEURONS
            counts = np.tile(counts * self.shape.experts_per_token // experts, (1, experts))
        else:
            predictors = (predictor_arrays(layer, trained) for layer in layers)
            arrays = {key: value for each in predictors for key, value in each.items()}
        profile = ActivityProfile(
            model_hash(self.path),
            (half, TOKENS - half),
            "not exactly zero",
            {f"{name}.{layer}": counts for layer in layers},
            arrays,
        )
        profile.save(adjacent_profile_path(self.path))
        return trained

    def _bias(self, active: float, cover: float) -> Floats:
        normal = NormalDist()
        levels = [
            normal.inv_cdf(float(prob)) for prob in neuron_probs(self.shape.feed_forward, active, cover)
        ]
        return np.asarray(np.array(levels) * np.linalg.norm(self.rows, axis=1), np.float32)

    def _write_biases(self, bias: Floats) -> None:
        with GGUFFile.open(self.path) as file:
            offsets = [file.tensors[f"blk.{layer}.{_judging(self.shape)}.bias"].offset
                       for layer in range(self.shape.layers)]  # fmt: skip
        with self.path.open("r+b") as file_bytes:
            for offset in offsets:
                file_bytes.seek(offset)
                file_bytes.write(np.tile(bias, self.shape.experts or 1).tobytes())


def _judging(shape: Shape) -> str:
    """The matrix whose sign shows which neurons are active."""
    name = "ffn_gate" if shape.gated else "ffn_up"
    return f"{name}_exps" if shape.experts else name


def write_planted(folder: Path, shape: Shape, kind: str) -> PlantedFile:
    """Write the file of a shape in a format; `plant` its activity before use."""
    random = np.random.Generator(np.random.SFC64(shape.feed_forward))
    neurons, width = shape.feed_forward, shape.width
    scale = np.float32(width**-0.5)
    first = random.standard_normal((PLANTED_RANK, width), np.float32) * scale
    second = random.standard_normal((neurons, PLANTED_RANK), np.float32) * np.float32(PLANTED_RANK**-0.5)
    rows = second @ first + random.standard_normal((neurons, width), np.float32) * (NOISE * scale)
    raw = encode(np.asarray(rows, np.float32).reshape(-1), kind)
    decoded = decode(raw, kind).reshape(neurons, width)
    path = folder / f"{shape.name}-{kind}.gguf"
    formats = matrix_formats(shape, kind)
    with GGUFWriter(path, _metadata(shape)) as writer:
        for name, values in _vectors(shape).items():
            writer.add_tensor(name, values, "F32")
        for name, size in shape.matrices().items():
            if f".{_judging(shape)}." in name:
                writer.add_tensor(name, np.tile(raw, shape.experts or 1), kind, size)
                continue
            spread = EMBEDDED if name == EMBEDDING else size[-1] ** -0.5
            blocks = RandomBlocks(formats[name], spread, random)
            writer.add_tensor(name, partial(blocks.stream, math.prod(size)), formats[name], size)
    return PlantedFile(path, shape, first, second, decoded)


def _metadata(shape: Shape) -> Mapping[str, Any]:
    return {**metadata(shape), "general.name": f"planted activity in the shape of {shape.name}"}


def _vectors(shape: Shape) -> dict[str, Floats]:
    """The norms, those of a Nemotron with biases, and the neurons' biases."""
    vectors = {name: np.ones(length, np.float32) for name, length in shape.vectors().items()}
    if not shape.gated:
        norms = [name for name in vectors if name.endswith("norm.weight")]
        vectors |= {name.replace(".weight", ".bias"): np.zeros(shape.width, np.float32) for name in norms}
    for layer in range(shape.layers):
        length = shape.feed_forward * (shape.experts or 1)
        vectors[f"blk.{layer}.{_judging(shape)}.bias"] = np.zeros(length, np.float32)
    return vectors
