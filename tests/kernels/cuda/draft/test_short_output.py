"""Draft heads on a GPU that draft from the first rows of their output, against the numpy formula."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation import draft_vocabulary
from edgeinfer.speculation.drafter import DraftRequest as Requested
from edgeinfer_kernels.cuda import device_parts
from edgeinfer_kernels.cuda.decode.device_logits import DeviceRows
from edgeinfer_kernels.draft_loop import DraftRequest, DraftSampling
from tests.edgeinfer.speculation.test_drafting import always_draft
from tests.edgeinfer.speculation.test_short_vocabulary import always_short, small_vocabularies
from tests.edgeinfer.speculation.test_tree import always_tree
from tests.kernels.cuda.draft.test_draft_head_steps import Pair, agrees, logits_after, read, text
from tests.kernels.cuda.draft.test_draft_head_steps import pair as pair
from tests.kernels.cuda.draft.test_head_loading import GPU, GREEDY, IDS, WITH_HEAD, drafter_of
from tests.kernels.cuda.draft.test_head_loading import unmeasured as unmeasured
from tests.kernels.cuda.draft.test_several_device_heads import Heads, model_file
from tests.kernels.cuda.draft.test_several_device_heads import heads as heads
from tests.kernels.cuda.draft.test_split_heads import WITH_HEAD as SPLIT_WITH_HEAD
from tests.kernels.cuda.draft.test_split_heads import Splitting
from tests.kernels.cuda.draft.test_split_heads import split as split
from tests.kernels.cuda.offload.conftest import small_gpu as small_gpu

SLICE, ROWS = 64, 128
"""Logits of a slice here, and the first rows: two slices of the models' 288 rows."""


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_parts, "SLICE", SLICE)


@pytest.mark.parametrize("pair", ["arcee"], indirect=True)
def test_a_chain_has_the_most_probable_tokens_of_the_first_rows(pair: Pair) -> None:
    ids = text(pair, 21)
    states = pair.exact_states(ids[:-1])
    read(pair, ids[:-1], (20,))
    logits_after(pair, ids[1:17], 0, 0)
    pair.exact_logits(ids[1:17], states[:16], 0)
    request = DraftRequest([0.0] * 4, [0.0] * 4, pair.head.spec.vocabulary_size, DraftSampling())
    for rows in (pair.head.spec.vocabulary_size, ROWS, SLICE, pair.head.spec.vocabulary_size):
        pair.head.limit_output(rows)
        pair.head.set_hidden(DeviceRows(16, 4, False), 16)
        drafted = pair.head.draft(ids[17:], 16, request)
        assert len(drafted.ids) == 4
        logits, own = pair.exact_logits(ids[17:], states[16:], 16)
        for index, (token, prob) in enumerate(zip(drafted.ids, drafted.probs, strict=True)):
            row = logits[-1][:rows]
            assert row[token] >= row.max() - 0.05 * np.abs(row).max()
            assert prob == pytest.approx(np.exp(row[token]) / np.exp(row).sum(), rel=0.1)
            logits, own = pair.exact_logits([token], own[-1:], 20 + index)


@pytest.mark.parametrize("pair", ["arcee"], indirect=True)
def test_a_tree_has_the_most_probable_tokens_of_the_first_rows(pair: Pair) -> None:
    ids = text(pair, 23)
    ids, nodes = ids[:21], ids[21:]
    states = pair.exact_states(ids[:-1])
    read(pair, ids[:-1], (20,))
    pair.head.limit_output(ROWS)
    pair.head.set_hidden(DeviceRows(0, 20, False), 0)
    logits_after(pair, ids[1:17], 0, 0)
    pair.exact_logits(ids[1:17], states[:16], 0)
    pair.head.set_hidden(DeviceRows(16, 4, False), 16)
    (root,) = pair.head.draft_level(ids[17:], 16, (), 5, 0.8)
    logits, own = pair.exact_logits(ids[17:], states[16:], 16)
    assert agrees(root, logits[-1][:ROWS], 0.8)
    found = pair.head.draft_level(nodes, 20, (-1, -1), 5, 0.8)
    for node, best in zip(nodes, found, strict=True):
        logits, _ = pair.exact_logits([node], own[-1:], 20)
        assert agrees(best, logits[0][:ROWS], 0.8)


@pytest.mark.parametrize("heads", ["step35"], indirect=True)
def test_each_of_several_heads_drafts_from_the_first_rows(heads: Heads) -> None:
    ids = [int(token) for token in np.random.default_rng(5).integers(3, 288, 12)]
    x = heads.target.embed(ids[:-1])
    heads.target.forward(x, 0)
    heads.target.logits(x[-1:])
    heads.first.limit_output(ROWS)
    heads.first.set_hidden(DeviceRows(0, 11, False), 0)
    request = DraftRequest([0.0] * 3, [0.0] * 3, 288, DraftSampling())
    drafted = heads.first.draft(ids[1:], 0, request)
    assert len(drafted.ids) == len(heads.exact_heads)
    for token, logits in zip(drafted.ids, heads.exact_drafts(ids, drafted.ids), strict=True):
        row = logits[:ROWS]
        assert row[token] >= row.max() - 0.05 * np.abs(row).max()


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("several", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_completions_with_a_short_vocabulary_equal_baseline_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    small_vocabularies(monkeypatch, SLICE)
    model: Callable[[Path], Path] = model_file("step35").write if several else WITH_HEAD.write
    path = model(tmp_path / "model.gguf")
    with edgeinfer.load(path, draft=None, **GPU) as plain:
        expected = plain.generate(IDS, **GREEDY).ids
    with edgeinfer.load(path, draft="mtp", **GPU) as loaded:
        drafter = drafter_of(loaded)
        assert drafter.short_vocabulary == draft_vocabulary.short_vocabulary(288, 288) == ROWS
        always_draft(loaded, 3)
        for is_short in (True, False):
            always_short(loaded, is_short=is_short)
            assert loaded.generate(IDS, **GREEDY).ids == expected
        draft = drafter.propose(
            loaded.engine.ids, Requested(3, SamplingParams(temperature=0.0), vocabulary=ROWS)
        )
        assert max(draft.ids, default=0) < ROWS


@pytest.mark.slow
def test_the_head_next_to_a_split_model_drafts_from_the_first_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: Splitting
) -> None:
    small_vocabularies(monkeypatch, SLICE)
    path = SPLIT_WITH_HEAD["arcee"].write(tmp_path / "model.gguf")
    with split(path, "mtp", draft_tree_width=2) as model:
        head, speculator, model.speculator = drafter_of(model), model.speculator, None
        assert head.short_vocabulary == ROWS
        expected = model.generate(IDS, **GREEDY).ids
        model.speculator = speculator
        for nodes in (0, 7):
            always_tree(model, 3, nodes or 3)
            monkeypatch.setattr(head, "tree_width", 3 if nodes else 1)
            always_short(model)
            model.engine.rewind(0)
            assert model.generate(IDS, **GREEDY).ids == expected
            params = SamplingParams(temperature=0.0)
            request = Requested(3, params, max_nodes=nodes, vocabulary=ROWS)
            assert 0 <= max(head.propose(model.engine.ids, request).ids) < ROWS


@pytest.mark.parametrize("pair", ["arcee"], indirect=True)
def test_all_drafts_that_a_completion_can_have_are_captured_on_loading(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captures are counted here, and launched instead."""
    head, kinds = pair.head, list[tuple[str | int, ...]]()
    drafts = head.drafts

    def prepare(kind: tuple[str | int, ...], launch: Callable[[], None], changed: object = None) -> None:
        kinds.append(kind)
        launch()

    monkeypatch.setattr(drafts.captured, "prepare", prepare)
    ids = text(pair, 21)
    read(pair, ids[:-1], (20,))
    request = DraftRequest([0.0] * 3, [0.0] * 3, pair.head.spec.vocabulary_size, DraftSampling())
    head.steps.use_widths((1, 2, 4))
    head.warm_up_drafts(ROWS, trees=True)
    expected = {(kind, width) for kind in ("first", "root") for width in (1, 2)}
    expected |= {("padded", 4), ("root, padded", 4), *(("further", count) for count in range(1, 7))}
    expected |= {("level", width) for width in (1, 2, 4)}
    next_step = ("next", 1, 2)
    assert sorted(set(kinds)) == sorted(
        [next_step, *((*kind, rows) for kind in expected for rows in (0, ROWS))]
    )
    assert drafts.rows == 0
    head.set_hidden(DeviceRows(0, 4, False), 0)
    assert len(head.draft(ids[1:5], 0, request).ids) == 3
    kinds.clear()
    head.warm_up_drafts(0, trees=False)
    assert {kind for kind, *_ in kinds} == {"first", "padded", "next", "further"}
