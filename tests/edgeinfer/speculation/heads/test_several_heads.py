"""Several draft heads in one file (Step 3.5, MiMo-V2): each drafts a token, and completions stay the same."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.errors import SettingError
from edgeinfer.model_config.layers.draft_head import read_draft_head
from edgeinfer.model_config.weights import read_config, read_weights, rope_factors
from edgeinfer.planning.model_plan import plan_model
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.drafter import DraftRequest
from edgeinfer.speculation.heads.several_heads import SeveralHeads
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.reference import ReferenceBackend
from edgeinfer_quant_formats import GGUFFile
from tests.edgeinfer.speculation.heads.drafting_models import CPU, GREEDY, drafter_of
from tests.edgeinfer.speculation.heads.random_heads import HEADS, HEADS_OF
from tests.edgeinfer.speculation.test_drafting import always_draft
from tests.model_zoo import ZOO

PROMPT = "Once upon a time, there was a little fox."


@pytest.fixture(scope="module", params=HEADS_OF)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return HEADS_OF[request.param](own_outputs=True).write(tmp_path_factory.mktemp("heads") / "heads.gguf")


@pytest.fixture(scope="module")
def drafting(path: Path) -> Iterator[Model]:
    with edgeinfer.load(path, draft="mtp", **CPU) as model:
        assert isinstance(drafter_of(model), SeveralHeads)
        yield model


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 3}])
def test_completions_equal_baseline_decoding(plain: Model, drafting: Model, settings: dict[str, Any]) -> None:
    always_draft(drafting, 5)
    for prompt in (PROMPT, PROMPT * 4):
        expected, actual = (model.generate(prompt, **{**GREEDY, **settings}) for model in (plain, drafting))
        assert actual.ids == expected.ids
        assert actual.speed.accepted_share is not None


def test_each_head_drafts_from_the_states_of_those_before_it(path: Path, drafting: Model) -> None:
    ids = drafting.tokenizer.encode(PROMPT)
    drafting.engine.rewind(0)
    drafting.engine.append(ids[:-1])
    draft = drafter_of(drafting).propose(ids, DraftRequest(7, SamplingParams(temperature=0.0)))
    assert len(draft.ids) == HEADS
    file = GGUFFile.open(path)
    config = read_config(file)
    weights, factors = read_weights(file, config), rope_factors(file, config, 256)
    spec = config.specification(factors)
    target = ReferenceBackend(spec, weights, DecoderState.allocate(spec, 256, "f32"), np.float64)
    x = target.embed(ids[:-1])
    target.forward(x, 0)
    states, tokens = list(x), ids[1:]
    for index, token in enumerate(draft.ids):
        head = read_draft_head(file, config, weights, factors, head=index)
        state = DecoderState.allocate(head.spec, 256, "f32")
        backend = ReferenceBackend(head.spec, head.weights, state, np.float64)
        backend.set_hidden(np.array(states), 0)
        x = backend.embed(tokens)
        backend.forward(x, 0)
        assert token == int(backend.logits(x)[-1].argmax())
        states, tokens = [*states, x[-1]], [*tokens, token]


def test_the_heads_are_in_the_plan_with_the_bytes_that_they_take(path: Path, drafting: Model) -> None:
    assert drafting.plan is not None
    planned = plan_model(path, draft="mtp", **CPU).plan
    bytes_of = {(item.item, item.device): item.bytes for item in planned.items}
    assert bytes_of == {(item.item, item.device): item.bytes for item in drafting.plan.items}
    assert bytes_of["draft head", "cpu"] == drafter_of(drafting).nbytes
    beside = plan_model(path, draft="mtp", device="rtx 4090, 64 GiB", context=256).plan
    assert beside.draft == "gpu"


def test_several_heads_of_other_architectures_are_refused_in_one_line(tmp_path: Path) -> None:
    twice = replace(
        ZOO["glm4moe"], extra={**ZOO["glm4moe"].extra, "nextn_predict_layers": 2, "block_count": 4}
    )
    path = twice.write(tmp_path / "twice.gguf")
    with pytest.raises(SettingError, match="the file has 2 of them, wanted 1") as caught:
        edgeinfer.load(path, draft="mtp", **CPU)
    assert "\n" not in str(caught.value)
