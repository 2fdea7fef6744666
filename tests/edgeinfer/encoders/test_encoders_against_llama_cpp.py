"""llama.cpp's hidden states, vectors and scores on a random file of every encoder: the formula is equal, the
kernels are close.

The goldens were made by `make_encoder_goldens.py`; ggml's GELU is a float16 table and costs 1e-3.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.embedding import pooled, pooling_of
from edgeinfer.engine.encoder_engine import EncoderEngine
from edgeinfer.model_config.architectures import ARCHITECTURES
from edgeinfer.model_config.pooling_head import read_pooling_head
from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.backend import Backend
from edgeinfer_kernels.cpu.backend import CpuBackend, CpuOptions
from edgeinfer_kernels.cpu.compiler.features import choose
from edgeinfer_kernels.cpu.compiler.kernel_cache import load_kernels
from edgeinfer_kernels.cpu.compiler.kernel_units import kernel_units
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.reference import ReferenceBackend
from edgeinfer_quant_formats import GGUFFile
from tests.edgeinfer.distances import distance, median_distance
from tests.edgeinfer.encoders.make_encoder_goldens import (
    CONTEXT,
    GOLDENS,
    NONE,
    ROWS,
    VARIANTS,
    encoder_of,
    has_pooling,
    llama_cpp_rows,
)
from tests.random_encoders import ENCODER_ZOO, TEXTS

Rows = npt.NDArray[np.floating]
FILES = [(name, variant) for name in ENCODER_ZOO for variant in VARIANTS if not ENCODER_ZOO[name].dense]
POOLED_FILES = [
    (name, variant) for name in ENCODER_ZOO if has_pooling(ENCODER_ZOO[name]) for variant in VARIANTS
]
OTHER_SEED = 11
SLACK = 1e-5


def rows_of(path: Path, backend_name: str) -> list[Rows]:
    """Hidden states (tokens, hidden_size) of `TEXTS`, in one step; for "exact" all in float64."""
    with GGUFFile.open(path) as file:
        config = read_config(file)
        specification, weights = config.specification(), read_weights(file, config)
        state = DecoderState.allocate(specification, CONTEXT, "f32")
        backend: Backend[Any]
        if backend_name == "exact":
            backend = ReferenceBackend(specification, weights, state, np.float64)
        else:
            kernels = load_kernels(user_folder("cache"), choose(), kernel_units(weights))
            backend = CpuBackend(specification, weights, state, kernels, CpuOptions(CONTEXT, 2))
        engine = EncoderEngine(specification, backend, CONTEXT, CONTEXT)
        try:
            return list(engine.text_rows(TEXTS))
        finally:
            engine.close()


@pytest.fixture(scope="module")
def goldens() -> dict[str, npt.NDArray[np.float32]]:
    return dict(np.load(GOLDENS))


def pooled_of(path: Path, rows: list[Rows]) -> Rows:
    """(texts, …): the vectors or, of a reranker, the scores of texts with these hidden states."""
    with GGUFFile.open(path) as file:
        config = read_config(file)
        head = read_pooling_head(file, config)
        pooling = pooling_of(file.metadata.get(f"{config.architecture}.pooling_type"))
    vectors = np.stack([pooled(each, head.pooling if head.ranks else pooling) for each in rows])
    return head.scores(vectors) if head.ranks else head.embedding(vectors)


def check(path: Path, name: str, variant: str, theirs: npt.NDArray[np.float32]) -> None:
    """The reference has llama.cpp's formula, and the kernels are about as close to it as llama.cpp's."""
    exact, ours = (np.concatenate(rows_of(path, backend))[list(ROWS)] for backend in ("exact", "cpu"))
    is_moe = ENCODER_ZOO[name].experts > 0
    measure = median_distance if is_moe else distance
    their_distance, our_distance = measure(theirs, exact), measure(ours, exact)
    print(f"{name} {variant}: llama.cpp {their_distance:.2e}, edgeinfer {our_distance:.2e}")
    if variant == "plain":
        uses_gelu = ARCHITECTURES[ENCODER_ZOO[name].architecture].activation == "gelu"
        assert their_distance < (2e-3 if uses_gelu else 5e-6)
    else:
        assert their_distance < (0.25 if is_moe or variant.startswith("Q4") else 0.05)
    assert our_distance <= 2 * their_distance + SLACK


@pytest.mark.default_cases(12)
@pytest.mark.parametrize(("name", "variant"), FILES)
def test_hidden_states_equal_llama_cpp(
    tmp_path: Path, goldens: dict[str, npt.NDArray[np.float32]], name: str, variant: str
) -> None:
    path = encoder_of(name, variant).write(tmp_path / "model.gguf")
    check(path, name, variant, goldens[f"{name} {variant}"])


def check_pooled(path: Path, name: str, variant: str, theirs: npt.NDArray[np.float32]) -> None:
    """As `check`, for vectors or scores."""
    exact, ours = (pooled_of(path, rows_of(path, backend)) for backend in ("exact", "cpu"))
    their_distance, our_distance = distance(theirs, exact), distance(ours, exact)
    print(f"{name} {variant} pooled: llama.cpp {their_distance:.2e}, edgeinfer {our_distance:.2e}")
    if variant == "plain":
        assert their_distance < 2e-3
    # Four scores aren't enough numbers for an average of errors.
    share = 4 if theirs.shape[1] < 4 else 2
    assert our_distance <= share * their_distance + SLACK


@pytest.mark.default_cases(8)
@pytest.mark.parametrize(("name", "variant"), POOLED_FILES)
def test_vectors_and_scores_equal_llama_cpp(
    tmp_path: Path, goldens: dict[str, npt.NDArray[np.float32]], name: str, variant: str
) -> None:
    path = encoder_of(name, variant).write(tmp_path / "model.gguf")
    check_pooled(path, name, variant, goldens[f"{name} {variant} pooled"])


@pytest.mark.default_cases(1)
@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", [name for name, variant in FILES if variant == "plain"])
def test_other_weights_give_the_hidden_states_of_llama_cpp(tmp_path: Path, name: str) -> None:
    pytest.importorskip("llama_cpp")
    path = encoder_of(name, "plain", OTHER_SEED).write(tmp_path / "model.gguf")
    check(path, name, "plain", llama_cpp_rows(path, NONE)[list(ROWS)])


@pytest.mark.slow
@pytest.mark.llama_cpp
@pytest.mark.parametrize("form", ["Q8_0", "Q4_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("name", [name for name, variant in FILES if variant == "plain"])
def test_files_of_one_type_are_as_close_as_llama_cpp(tmp_path: Path, name: str, form: str) -> None:
    pytest.importorskip("llama_cpp")
    path = replace(encoder_of(name, "quantized", OTHER_SEED), formats=(form,)).write(tmp_path / "model.gguf")
    check(path, name, form, llama_cpp_rows(path, NONE)[list(ROWS)])


def test_every_encoder_has_goldens(goldens: dict[str, npt.NDArray[np.float32]]) -> None:
    pooled_names = {f"{name} {variant} pooled" for name, variant in POOLED_FILES}
    assert set(goldens) == {f"{name} {variant}" for name, variant in FILES} | pooled_names
    encoders = {name for name, spec in ARCHITECTURES.items() if spec.encoder is not None}
    assert {model.architecture for model in ENCODER_ZOO.values()} == encoders
