"""Draft heads on the CPU against the numpy formula, and the hidden states that backends keep."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.model_config.layers.draft_head import DraftHeadModel, read_draft_head
from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer_kernels.backend import Backend
from edgeinfer_kernels.cpu.backend import CpuBackend, CpuOptions
from edgeinfer_kernels.cpu.compiler.kernel_units import kernel_units, row_units
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.draft_loop import DraftRequest, DraftSampling
from edgeinfer_kernels.reference import ReferenceBackend
from edgeinfer_quant_formats import GGUFFile
from tests.edgeinfer.speculation.heads.random_heads import nemotron_head
from tests.kernels.conftest import BEST, built_kernels
from tests.model_zoo import ZOO
from tests.random_models import VOCABULARY, RandomModel

CONTEXT, PAIRS = 96, 40
IDS = np.random.default_rng(5).integers(3, VOCABULARY, PAIRS).tolist()
MODELS = {
    "qwen35": ZOO["qwen35-draft-head"],
    "glm4moe": ZOO["glm4moe"],
    "nemotron_h_moe": nemotron_head(),
    "odd": RandomModel("arcee", layers=2, width=60, head_dim=20, heads=3, kv_heads=1, draft_head=True),
    "Q8_0": RandomModel("arcee", layers=2, draft_head=True, formats=("Q8_0",)),
}


def head_of(name: str, folder: Path) -> DraftHeadModel:
    file = GGUFFile.open(MODELS[name].write(folder / f"{name}.gguf"))
    config = read_config(file)
    return read_draft_head(file, config, read_weights(file, config))


def on_cpu(
    head: DraftHeadModel, threads: int = 2, repack: bool = True, formats: Sequence[str] = ()
) -> CpuBackend:
    """The head on the CPU, with the kernels of further `formats`."""
    state = DecoderState.allocate(head.spec, CONTEXT, "f32")
    in_file = [] if repack else head.weights.matrices()
    units = dict.fromkeys([*kernel_units(head.weights), *row_units(formats)])
    kernels = built_kernels(BEST, list(units))
    return CpuBackend(head.spec, head.weights, state, kernels, CpuOptions(64, threads, in_file))


def exact(head: DraftHeadModel) -> ReferenceBackend:
    return ReferenceBackend(
        head.spec, head.weights, DecoderState.allocate(head.spec, CONTEXT, "f32"), np.float64
    )


def states(width: int, count: int = PAIRS) -> npt.NDArray[np.float32]:
    return np.random.default_rng(7).standard_normal((count, width)).astype(np.float32)


def run(
    backend: Backend[np.ndarray], ids: list[int], rows: npt.NDArray[np.float32], start: int
) -> np.ndarray:
    """The logits after pairs of tokens and hidden states."""
    backend.set_hidden(rows, start)
    x = backend.embed(ids)
    backend.forward(x, start)
    return backend.logits(x)


@pytest.mark.parametrize("repack", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_head_equals_the_formula(name: str, repack: bool, tmp_path: Path) -> None:
    head = head_of(name, tmp_path)
    kernel, formula = on_cpu(head, repack=repack), exact(head)
    rows = states(head.spec.hidden_size)
    for first, last in ((0, 30), (30, 33), (33, 34), (34, PAIRS)):
        actual, expected = (
            run(backend, IDS[first:last], rows[first:last], first) for backend in (kernel, formula)
        )
        near = 5e-6 if name != "Q8_0" else 0.03
        assert np.abs(actual - expected).max() <= near * np.abs(expected).max()
    kernel.close()


@pytest.mark.parametrize("given", [1, 5])
def test_a_drafted_token_reads_the_state_that_the_head_has_normed(given: int, tmp_path: Path) -> None:
    head = head_of("Q8_0", tmp_path)
    kernel, formula = on_cpu(head), exact(head)
    rows, ids = states(head.spec.hidden_size)[30 : 30 + given], IDS[30 : 30 + given]
    for backend in (kernel, formula):
        run(backend, IDS[:30], states(head.spec.hidden_size)[:30], 0)
    kernel.set_hidden(rows, 30)
    request = DraftRequest([0.0] * 5, [0.0] * 5, VOCABULARY, DraftSampling())
    drafted = kernel.draft(ids, 30, request)
    assert len(drafted.ids) == 5
    for index, token in enumerate(drafted.ids):
        start = 30 if index == 0 else 29 + given + index
        formula.set_hidden(rows, start)
        x = formula.embed(ids)
        formula.forward(x, start)
        logits = formula.logits(x)[-1]
        assert logits[token] >= logits.max() - 0.05 * np.abs(logits).max()
        rows, ids = formula.final_norm(x[-1:]), [token]
    kernel.close()


@pytest.mark.parametrize("tokens", [1, 7, 30])
def test_kept_hidden_states_are_those_after_the_layers(tokens: int, tmp_path: Path) -> None:
    file = GGUFFile.open(ZOO["qwen35-draft-head"].write(tmp_path / "model.gguf"))
    config = read_config(file)
    spec, weights = config.specification(), read_weights(file, config)
    found = []
    for kernels in (built_kernels(BEST, kernel_units(weights)), None):
        state = DecoderState.allocate(spec, CONTEXT, "f32")
        backend: Backend[np.ndarray] = (
            ReferenceBackend(spec, weights, state)
            if kernels is None
            else CpuBackend(spec, weights, state, kernels, CpuOptions(64, 2))
        )
        backend.keep_hidden((0, 2, len(spec.layers)))
        if kernels is not None and tokens <= backend.capabilities.max_step_tokens:
            logits = backend.step_logits(IDS[:tokens], 0)
        else:
            x = backend.embed(IDS[:tokens])
            backend.forward(x, 0)
            logits = backend.logits(x)
        kept = backend.kept_hidden(tokens)
        assert [each.shape for each in kept] == 3 * [(tokens, spec.hidden_size)]
        np.testing.assert_allclose(backend.logits(kept[2]), logits)
        found.append([each.copy() for each in kept])
    for actual, expected in zip(*found, strict=True):
        np.testing.assert_allclose(actual, expected, atol=2e-5 * np.abs(expected).max())
