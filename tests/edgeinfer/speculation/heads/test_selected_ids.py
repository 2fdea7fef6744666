"""Draft heads (MTP) with an output for some of the token ids, as `training/` writes them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.errors import SettingError
from edgeinfer.planning.model_plan import plan_model
from edgeinfer.registry.registry import find_model
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.drafter import Draft, DraftRequest
from edgeinfer_quant_formats import GGUFFile
from tests.edgeinfer.speculation.heads.drafting_models import CPU, GREEDY, drafter_of
from tests.edgeinfer.speculation.heads.head_files import with_output
from tests.edgeinfer.speculation.test_drafting import always_draft

STORY = "Once upon a time, there was a little girl named Lily."
OUTPUT = "blk.10.nextn.shared_head_head.weight"
STRIDE = 3
"""Between the rows of the built-in head that the selected one has."""


def built_in_head() -> Path:
    path = find_model("tiny").head_path
    assert path is not None
    return path


def selected_rows() -> tuple[np.ndarray, np.ndarray]:
    """Some rows of the built-in head's output, and their ids."""
    with GGUFFile.open(built_in_head()) as file:
        rows = np.array(file.decode(OUTPUT), np.float32).reshape(file.tensors[OUTPUT].shape)
        return rows[::STRIDE].copy(), file.raw("d2t").reshape(-1).view(np.int64)[::STRIDE].copy()


@pytest.fixture(scope="module")
def selected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in head with a part of its output, in Q8_0, which isn't the embedding's type."""
    return with_output(built_in_head(), tmp_path_factory.mktemp("selected") / "head.gguf", *selected_rows())


@pytest.fixture(scope="module", params=["built-in", "selected"])
def drafting(request: pytest.FixtureRequest, selected: Path) -> Iterator[Model]:
    draft = "mtp" if request.param == "built-in" else selected
    with edgeinfer.load("tiny", draft=draft, draft_tree_width=3, **CPU) as model:
        yield model


def draft_of(model: Model, nodes: int = 0, **params: Any) -> Draft:
    ids = model.tokenizer.encode(STORY)
    model.engine.rewind(0)
    model.engine.append(ids[:-1])
    request = DraftRequest(5, SamplingParams(**params), max_nodes=nodes)
    draft: Draft = drafter_of(model).propose(ids, request)
    return draft


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 3}])
def test_completions_equal_baseline_decoding(drafting: Model, settings: dict[str, Any]) -> None:
    with edgeinfer.load("tiny", draft=None, **CPU) as plain:
        expected = plain.generate(STORY, **{**GREEDY, **settings})
    for width in (3, 1):
        drafter_of(drafting).tree_width = width
        always_draft(drafting, 4)
        assert drafting.generate(STORY, **{**GREEDY, **settings}).ids == expected.ids
    drafter_of(drafting).tree_width = 3


@pytest.mark.parametrize("nodes", [0, 12])
def test_the_drafted_tokens_are_the_selected_ids(selected: Path, nodes: int) -> None:
    ids = set(selected_rows()[1].tolist())
    with edgeinfer.load("tiny", draft=selected, draft_tree_width=3, **CPU) as model:
        for params in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 1}):
            draft = draft_of(model, nodes, **params)
            assert draft.ids
            assert set(draft.ids) <= ids


def test_the_first_token_is_the_most_probable_selected_one(selected: Path) -> None:
    """The selected head is the built-in one in another type, so its probabilities are near."""
    with edgeinfer.load("tiny", draft=selected, **CPU) as model:
        (first, *_) = draft_of(model, temperature=0.0).ids
    with edgeinfer.load("tiny", draft="mtp", **CPU) as model:
        whole = draft_of(model, temperature=1.0)
    assert whole.distributions is not None
    ids, probs = whole.distributions[0]
    is_selected = np.isin(ids, selected_rows()[1])
    assert probs[list(ids).index(first)] >= 0.8 * probs[is_selected].max()


@pytest.mark.parametrize("draft", ["mtp", "selected"])
def test_runs_and_the_plan_know_the_output(selected: Path, draft: str) -> None:
    """Several drafts are one run also if the embedding has another type than the head's matrices."""
    path = selected if draft == "selected" else draft
    with edgeinfer.load("tiny", draft=path, **CPU) as model:
        drafter = drafter_of(model)
        assert drafter.max_cycles(model.engine) > 1
        items = plan_model("tiny", draft=path, **CPU).plan.items
        assert sum(each.bytes for each in items if each.item.startswith("draft head")) == drafter.nbytes


@pytest.mark.parametrize(
    ("output", "ids", "message"),
    [
        (None, range(16), r"d2t without blk\.\d+\.nextn\.shared_head_head\.weight, wanted both or none"),
        (np.ones((16, 512), np.float32), None, "shared_head_head"),
        (np.ones((16, 512), np.float32), range(32), "shared_head_head"),
        (np.ones((16, 512), np.float32), range(8180, 8196), "id 8192, wanted 0 to 8191"),
        (np.ones((16, 512), np.float32), [1] * 16, "an id occurs twice"),
    ],
)
def test_an_output_without_its_ids_is_refused_in_one_line(
    tmp_path: Path, output: np.ndarray | None, ids: Any, message: str
) -> None:
    path = with_output(built_in_head(), tmp_path / "head.gguf", output, ids)
    with pytest.raises(SettingError, match=rf"^draft: head(\.gguf)?: .*{message}") as caught:
        edgeinfer.load("tiny", draft=path, **CPU)
    assert "\n" not in str(caught.value)
