"""llama.cpp's logits on a random file of every architecture: the formula is equal, the kernels are close.

The goldens were made by `make_logit_goldens.py`; ggml's GELU is a float16 table and costs 1e-3.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.model_config.architectures import ARCHITECTURES
from edgeinfer.model_config.weights import read_config, read_weights, rope_factors
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.backend import Backend
from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.caches.ring_cache import ring_for
from edgeinfer_kernels.cpu.backend import CpuBackend, CpuOptions
from edgeinfer_kernels.cpu.compiler.features import choose
from edgeinfer_kernels.cpu.compiler.kernel_cache import load_kernels
from edgeinfer_kernels.cpu.compiler.kernel_units import kernel_units
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.reference import ReferenceBackend
from edgeinfer_quant_formats import GGUFFile
from tests.edgeinfer.distances import distance, median_distance
from tests.edgeinfer.make_logit_goldens import (
    CONTEXT,
    GOLDENS,
    IDS,
    STORED_POSITIONS,
    llama_cpp_logits,
    quantized,
)
from tests.model_zoo import ZOO
from tests.random_latents import legacy_layers
from tests.random_models import VOCABULARY, RandomModel
from tests.zoo.ring_layers import with_rings

Logits = npt.NDArray[np.floating]
FILES = [(name, variant) for name in ZOO for variant in ("plain", "quantized")]
OTHER_SEED = 11
LIVE_QUANTIZED = ("llama", "gemma3", "phi3-longrope", "qwen3moe")
LIVE = [file for file in FILES if file[1] == "plain" or file[0] in LIVE_QUANTIZED]
SLACK = 1e-5
LONG_IDS = np.random.default_rng(8).integers(3, VOCABULARY, 1500).tolist()
"""More tokens than positions of a ring cache with a window of six."""


def model_of(name: str, variant: str, seed: int = 0) -> RandomModel:
    model = replace(ZOO[name], seed=seed)
    return quantized(model) if variant == "quantized" else model


def logits_of(
    path: Path, backend_name: str, ids: Sequence[int] = IDS, context: int = CONTEXT, batch: int = 16
) -> Logits:
    """(len(ids), vocabulary), on a float32 cache or, for "exact", all in float64 and cached whole."""
    with GGUFFile.open(path) as file:
        config = read_config(file)
        specification = config.specification(rope_factors(file, config, context))
        if backend_name == "exact":
            specification = with_rings(specification, 0)
        weights, state = read_weights(file, config), DecoderState.allocate(specification, context, "f32")
        backend: Backend[Any]
        if backend_name == "exact":
            backend = ReferenceBackend(specification, weights, state, np.float64)
        else:
            kernels = load_kernels(user_folder("cache"), choose(), kernel_units(weights))
            backend = CpuBackend(specification, weights, state, kernels, CpuOptions(batch, 2))
        engine = NativeEngine(specification, backend, context, len(ids) if backend_name == "exact" else batch)
        try:
            return engine.append_all(ids)
        finally:
            engine.close()


def decided(logits: Logits, margin: float) -> Iterator[tuple[int, int]]:
    """(row, best token) of the rows whose best is ahead by more than `margin`."""
    for row, values in enumerate(logits):
        second, best = np.argsort(values)[-2:]
        if values[best] - values[second] > margin:
            yield row, int(best)


def uses_gelu(name: str) -> bool:
    return ARCHITECTURES[ZOO[name].architecture].activation == "gelu"


@pytest.fixture(scope="module")
def goldens() -> dict[str, npt.NDArray[np.float32]]:
    return dict(np.load(GOLDENS))


def golden_name(name: str, variant: str) -> str:
    return name + (" quantized" if variant == "quantized" else "")


def test_every_file_of_the_zoo_has_goldens(goldens: dict[str, npt.NDArray[np.float32]]) -> None:
    assert set(goldens) == {golden_name(*file) for file in FILES}
    decoders = {name for name, spec in ARCHITECTURES.items() if spec.encoder is None}
    assert {ZOO[name].architecture for name in ZOO} == decoders


def check(path: Path, name: str, variant: str, theirs: npt.NDArray[np.float32]) -> None:
    """The reference has llama.cpp's formula, and the kernels are about as close to it as llama.cpp's."""
    exact, ours = (logits_of(path, backend)[STORED_POSITIONS] for backend in ("exact", "cpu"))
    compare(ours, exact, name, variant, theirs)


def compare(ours: Logits, exact: Logits, name: str, variant: str, theirs: Logits) -> None:
    moe_model = ZOO[name].experts > 0
    measure = median_distance if moe_model else distance
    their_distance = measure(theirs, exact)
    if variant == "plain":
        assert their_distance < (2e-3 if uses_gelu(name) else 5e-6)
    else:
        # int8 activations in both, which change experts at near-ties; a recurrent layer multiplies the
        # errors of three projections or more, and tens of layers add theirs.
        has_many = ZOO[name].convolutions or ZOO[name].hybrid or ZOO[name].layers > 30
        assert their_distance < (0.25 if moe_model else 0.2 if has_many else 0.05)
    assert measure(ours, exact) <= 2 * their_distance + SLACK
    for row, best in decided(exact, margin=2 * float(np.abs(theirs - exact).max()) + SLACK):
        assert ours[row].argmax() == best


@pytest.mark.default_cases(12)
@pytest.mark.parametrize(("name", "variant"), FILES)
def test_logits_equal_llama_cpp(
    tmp_path: Path, goldens: dict[str, npt.NDArray[np.float32]], name: str, variant: str
) -> None:
    path = model_of(name, variant).write(tmp_path / "model.gguf")
    check(path, name, variant, goldens[golden_name(name, variant)])


@pytest.mark.default_cases(4)
@pytest.mark.llama_cpp
@pytest.mark.parametrize(("name", "variant"), LIVE)
def test_logits_equal_llama_cpp_on_other_weights(tmp_path: Path, name: str, variant: str) -> None:
    pytest.importorskip("llama_cpp")
    path = model_of(name, variant, OTHER_SEED).write(tmp_path / "model.gguf")
    check(path, name, variant, llama_cpp_logits(path, IDS)[STORED_POSITIONS])


@pytest.mark.default_cases(1)
@pytest.mark.llama_cpp
@pytest.mark.parametrize("variant", ["plain", "quantized"])
def test_older_files_of_latent_attention_have_the_logits_of_llama_cpp(tmp_path: Path, variant: str) -> None:
    pytest.importorskip("llama_cpp")
    model = replace(ZOO["deepseek2-lite"], hybrid=legacy_layers())
    path = (quantized(model) if variant == "quantized" else model).write(tmp_path / "model.gguf")
    theirs, exact = llama_cpp_logits(path, IDS), logits_of(path, "exact")
    # The keys are rounded to float16.
    assert median_distance(theirs, exact) < (1e-3 if variant == "plain" else 0.25)
    within = 1e-3 if variant == "plain" else 2 * median_distance(theirs, exact)
    assert median_distance(logits_of(path, "cpu"), exact) < within


@pytest.mark.slow
@pytest.mark.llama_cpp
@pytest.mark.parametrize("variant", ["plain", "quantized"])
@pytest.mark.parametrize("name", ["gemma3", "gemma4-per-layer"])
def test_a_text_longer_than_a_ring_cache_has_the_logits_of_llama_cpp(
    tmp_path: Path, name: str, variant: str
) -> None:
    pytest.importorskip("llama_cpp")
    path, context = model_of(name, variant).write(tmp_path / "model.gguf"), len(LONG_IDS) + 32
    with GGUFFile.open(path) as file:
        blocks = read_config(file).specification().specs(AttentionSpec)
    ring = ring_for(6)
    assert {block.cached_positions(context) for block in blocks} == {ring, context}
    around = [*range(0, len(LONG_IDS), 100), *range(ring - 2, ring + 9), len(LONG_IDS) - 1]
    theirs = llama_cpp_logits(path, LONG_IDS, context)[around]
    ours, exact = (logits_of(path, each, LONG_IDS, context, 256)[around] for each in ("cpu", "exact"))
    compare(ours, exact, name, variant, theirs)


@pytest.mark.default_cases(1)
@pytest.mark.llama_cpp
@pytest.mark.parametrize(
    ("name", "omitted"),
    [
        ("gemma2", "attn_logit_softcapping"),
        ("gemma2", "final_logit_softcapping"),
        ("gemma2", "attention.sliding_window"),
        ("gemma3", "rope.freq_base"),
        ("llama-yarn", "rope.scaling.original_context_length"),
        ("phi3-longrope", "rope.scaling.attn_factor"),
    ],
)
def test_omitted_metadata_have_the_defaults_of_llama_cpp(tmp_path: Path, name: str, omitted: str) -> None:
    pytest.importorskip("llama_cpp")
    extra = {key: value for key, value in ZOO[name].extra.items() if key != omitted}
    path = replace(ZOO[name], extra=extra).write(tmp_path / "model.gguf")
    check(path, name, "plain", llama_cpp_logits(path, IDS)[STORED_POSITIONS])
