"""Draft heads on a GPU with an output for some of the token ids; also of a model split with the CPU."""

from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer.model_config.layers import draft_output
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.drafter import DraftRequest
from edgeinfer.speculation.heads.device_head import DeviceHead
from tests.edgeinfer.speculation.heads.head_files import drafted_ids, split_heads, with_output
from tests.edgeinfer.speculation.test_drafting import always_draft
from tests.edgeinfer.speculation.test_tree import always_tree
from tests.kernels.cuda.draft.test_head_loading import GPU, GREEDY, IDS, WITH_HEAD, drafter_of
from tests.kernels.cuda.draft.test_head_loading import unmeasured as unmeasured
from tests.kernels.cuda.draft.test_split_heads import WITH_HEAD as SPLIT
from tests.kernels.cuda.draft.test_split_heads import Splitting, check_completions, drafts_of
from tests.kernels.cuda.draft.test_split_heads import split as split
from tests.kernels.cuda.offload.conftest import small_gpu as small_gpu
from tests.random_models import RandomModel

ROWS = 48


def files(folder: Path, with_head: RandomModel = WITH_HEAD) -> tuple[Path, Path, set[int]]:
    """A model, its head, and the ids that this drafts."""
    whole = with_head.write(folder / "whole.gguf")
    model, shared = split_heads(whole, folder / "model.gguf", folder / "shared.gguf")
    ids = drafted_ids(ROWS, 1)
    output = np.random.default_rng(2).standard_normal((ROWS, with_head.width)).astype(np.float32)
    return model, with_output(shared, folder / "head.gguf", output, ids), set(ids.tolist())


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("width", [1, 3])
def test_drafts_have_the_selected_ids_and_completions_equal_baseline_decoding(
    tmp_path: Path, width: int
) -> None:
    path, head, ids = files(tmp_path)
    with edgeinfer.load(path, draft=None, **GPU) as plain:
        expected = plain.generate(IDS, **GREEDY).ids
    with edgeinfer.load(path, draft=head, draft_tree_width=width, **GPU) as model:
        if width > 1:
            always_tree(model, 3, 5)
        else:
            always_draft(model, 3)
        assert model.generate(IDS, **GREEDY).ids == expected
        model.engine.rewind(0)
        model.engine.append(IDS[:-1])
        nodes = 5 if width > 1 else 0
        draft = drafter_of(model).propose(
            IDS, DraftRequest(3, SamplingParams(temperature=0), max_nodes=nodes)
        )
        assert draft.ids
        assert set(draft.ids) <= ids


@pytest.mark.slow
def test_the_head_of_a_split_model_has_its_output_on_the_gpu(tmp_path: Path, split: Splitting) -> None:
    path, head, ids = files(tmp_path, SPLIT["arcee"])
    with split(path, head, draft_tree_width=3) as model:
        check_completions(model, DeviceHead)
        assert all(set(draft.ids) <= ids for draft in drafts_of(model))


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
def test_a_head_with_half_the_vocabulary_drafts_the_first_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_output, "MAX_WHOLE_VOCABULARY", 64)
    path = WITH_HEAD.write(tmp_path / "model.gguf")
    with edgeinfer.load(path, draft=None, **GPU) as plain:
        expected = plain.generate(IDS, **GREEDY).ids
    with edgeinfer.load(path, draft="mtp", **GPU) as model:
        always_draft(model, 3)
        assert drafter_of(model).nbytes > 0
        assert model.generate(IDS, **GREEDY).ids == expected
