"""EAGLE-3 heads on the CPU against the numpy formula."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.model_config.layers.draft_head import DraftHeadModel
from edgeinfer.model_config.layers.eagle_head import read_eagle_head
from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer_kernels.backend import Backend
from edgeinfer_kernels.draft_loop import DraftRequest, DraftSampling
from edgeinfer_quant_formats import GGUFFile
from tests.edgeinfer.speculation.heads.eagle.random_eagle import RandomEagle
from tests.kernels.heads.test_draft_head import IDS, PAIRS, exact, on_cpu, states
from tests.random_models import RandomModel

TARGET = RandomModel("llama", layers=4, formats=("Q8_0",))
HEADS = {
    "plain": RandomEagle(),
    "norms": RandomEagle(norm_before_fc=True, norm_before_residual=True),
    "odd": RandomEagle(width=60, own_table=True, head_dim=20, heads=3, kv_heads=1),
    "shared": RandomEagle(rows=0),
    "Q8_0": RandomEagle(format="Q8_0", own_table=True),
}


def head_of(head: RandomEagle, folder: Path) -> DraftHeadModel:
    target = GGUFFile.open(TARGET.write(folder / "target.gguf"))
    config = read_config(target)
    file = GGUFFile.open(head.write(folder / "head.gguf"))
    return read_eagle_head(file, config, read_weights(target, config))


def run(
    backend: Backend[np.ndarray], ids: list[int], rows: npt.NDArray[np.float32], start: int
) -> tuple[np.ndarray, np.ndarray]:
    """The logits after pairs of tokens and states of the target, and the rows after the layer."""
    backend.set_hidden(rows, start)
    x = backend.embed(ids)
    backend.forward(x, start)
    return backend.logits(x), x.copy()


@pytest.mark.parametrize("name", HEADS)
def test_a_head_equals_the_formula(name: str, tmp_path: Path) -> None:
    head = head_of(HEADS[name], tmp_path)
    kernel, formula = on_cpu(head), exact(head)
    rows, near = states(3 * TARGET.width), 0.03 if name in ("shared", "Q8_0") else 1e-5
    for first, last in ((0, 30), (30, 33), (33, 34), (34, PAIRS)):
        found = [run(each, IDS[first:last], rows[first:last], first)[0] for each in (kernel, formula)]
        assert np.abs(found[0] - found[1]).max() <= near * np.abs(found[1]).max()
    own = states(head.spec.hidden_size, 3)
    for backend in (kernel, formula):
        backend.set_own_hidden(own, PAIRS)
    found = []
    for backend in (kernel, formula):
        x = backend.embed(IDS[:3])
        backend.forward(x, PAIRS)
        found.append(backend.logits(x))
    assert np.abs(found[0] - found[1]).max() <= near * np.abs(found[1]).max()
    kernel.close()


@pytest.mark.parametrize("given", [1, 5])
def test_the_draft_loop_drafts_ids_of_the_target_from_the_states_of_the_head(
    given: int, tmp_path: Path
) -> None:
    head = head_of(replace(HEADS["Q8_0"], own_table=True), tmp_path)
    kernel, formula = on_cpu(head, formats=("Q8_0",)), exact(head)
    ids_of_rows = head.weights.output_ids
    assert ids_of_rows is not None
    rows, ids = states(3 * TARGET.width)[30 : 30 + given], IDS[30 : 30 + given]
    for backend in (kernel, formula):
        run(backend, IDS[:30], states(3 * TARGET.width)[:30], 0)
    kernel.set_hidden(rows, 30)
    request = DraftRequest([0.0] * 5, [0.0] * 5, head.spec.vocabulary_size, DraftSampling())
    drafted = kernel.draft(ids, 30, request)
    assert len(drafted.ids) == 5
    logits, x = run(formula, ids, rows, 30)
    for index, token in enumerate(drafted.ids):
        row = int(np.flatnonzero(ids_of_rows == token)[0])
        assert logits[-1, row] >= logits[-1].max() - 0.05 * np.abs(logits).max()
        formula.set_own_hidden(x[-1:], 30 + given + index)
        x = formula.embed([token])
        formula.forward(x, 30 + given + index)
        logits = formula.logits(x)
    kernel.close()
