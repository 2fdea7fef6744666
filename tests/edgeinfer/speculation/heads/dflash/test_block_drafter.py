"""Block drafters (DFlash, DSpark): drafts change the speed of a completion and nothing else."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.errors import SettingError, UnsupportedModelError
from edgeinfer.model_config.layers.block_drafts import BlockDraftModel, read_block_drafts
from edgeinfer.model_config.support import support_of
from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer.planning.model_plan import plan_model
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.drafter import DraftRequest
from edgeinfer.speculation.heads.block_drafter import BlockDrafter
from edgeinfer_kernels.reference import ReferenceBackend
from edgeinfer_quant_formats import GGUFFile
from tests.edgeinfer.speculation.heads.dflash.random_dflash import VARIANTS, RandomDFlash
from tests.edgeinfer.speculation.heads.drafting_models import CPU, GREEDY, drafter_of, sampled_drafts
from tests.edgeinfer.speculation.test_drafting import always_draft
from tests.edgeinfer.speculation.test_tree import always_tree
from tests.random_models import RandomModel

PROMPT = "Once upon a time, there was a little fox."
TARGET = RandomModel("llama", layers=4, context=256)
DRAFTS = {
    "shared": RandomDFlash(block_size=8),
    "quantized": RandomDFlash(format="Q8_0", own_tables=True, block_size=8),
    "windows": replace(VARIANTS["windows"], block_size=8),
    "markov": RandomDFlash(rank=16, block_size=5),
    "selector": RandomDFlash(selector_rank=16, rows=96, block_size=8),
    "ids": RandomDFlash(rank=16, rows=96, extra={"sample_from_anchor": False}),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TARGET.write(tmp_path_factory.mktemp("target") / "target.gguf")


@pytest.fixture(scope="module", params=DRAFTS)
def draft(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return DRAFTS[request.param].write(tmp_path_factory.mktemp(request.param) / "draft.gguf")


@pytest.fixture(scope="module")
def drafting(path: Path, draft: Path) -> Iterator[Model]:
    with edgeinfer.load(path, draft=draft, **CPU) as model:
        assert isinstance(drafter_of(model), BlockDrafter)
        yield model


@pytest.mark.parametrize("length", [1, 4, 7])
@pytest.mark.parametrize("settings", [{}, {"repeat_penalty": 1.3}, {"temperature": 0.9, "seed": 3}])
def test_completions_equal_baseline_decoding(
    plain: Model, drafting: Model, settings: dict[str, Any], length: int
) -> None:
    always_draft(drafting, length)
    expected, actual = (model.generate(PROMPT, **{**GREEDY, **settings}) for model in (plain, drafting))
    assert actual.ids == expected.ids
    assert actual.speed.accepted_share is not None


def drafted_by_formula(path: Path, draft: Path, ids: list[int], count: int) -> list[int]:
    """The most probable tokens of a block after a text, by the formula."""
    with GGUFFile.open(path) as target, GGUFFile.open(draft) as file:
        config = read_config(target)
        weights = read_weights(target, config)
        model, spec = read_block_drafts(file, config, weights), config.specification()
        engine = ReferenceBackend(spec, weights, model_state(model, spec), np.float64)
        engine.keep_hidden(model.target_layers)
        engine.forward(engine.embed(ids[:-1]), 0)
        states = np.concatenate(engine.kept_hidden(len(ids) - 1), axis=1)
        state = model.allocate_state(256, "f32")
        backend = ReferenceBackend(model.spec, model.weights, state, np.float64)
        backend.set_hidden(states, 0)
        backend.forward_layers(backend.embed([0] * len(states)), 0, [0])
        rows = count + (not model.from_first)
        x = backend.embed([ids[-1], *[model.mask_token] * (rows - 1)])
        backend.forward_layers(x, len(states), range(1, len(model.spec.layers)))
        x = x[rows - count :]
        return chosen(model, backend.logits(x), backend.final_norm(x), ids[-1])


def model_state(model: BlockDraftModel, spec: Any) -> Any:
    return type(model.allocate_state(1, "f32")).allocate(spec, 256, "f32")


def chosen(model: BlockDraftModel, logits: Any, states: Any, token: int) -> list[int]:
    found, ids = list[int](), model.weights.output_ids
    for row, state in zip(logits, states, strict=True):
        if model.selector is not None:
            best = np.argsort(-row)[: model.selector.count]
            tokens = best if ids is None else ids[best]
            gate = model.selector.hidden.decoded() @ state
            before = model.selector.predecessor.decoded_rows(np.array([token]))[0] * gate
            scores = row[best] + model.selector.successor.decoded_rows(tokens) @ before
            row = np.full_like(row, -np.inf)
            row[best] = scores
        if model.markov is not None:
            w = model.markov.weights
            row = row + w.output.decoded() @ w.token_embd.decoded_rows(np.array([token]))[0]
        largest = int(row.argmax())
        token = largest if ids is None else int(ids[largest])
        found.append(token)
    return found


def test_the_drafts_are_those_of_the_formula(path: Path, draft: Path, drafting: Model) -> None:
    ids = drafting.tokenizer.encode(PROMPT * 3)
    drafting.engine.rewind(0)
    drafting.engine.append(ids[:40])
    for token in ids[40:-1]:
        drafting.engine.append([token])
    request = DraftRequest(4, SamplingParams(temperature=0.0))
    assert list(drafter_of(drafting).propose(ids, request).ids) == drafted_by_formula(path, draft, ids, 4)


def test_a_draft_is_no_longer_than_a_block(drafting: Model) -> None:
    ids = drafting.tokenizer.encode(PROMPT)
    drafting.engine.rewind(0)
    drafting.engine.append(ids[:-1])
    model = drafter_of(drafting)
    draft = model.propose(ids, DraftRequest(7, SamplingParams(temperature=0.0)))
    assert 4 <= len(draft.ids) <= 7
    assert len(draft.probs) == len(draft.ids)


def test_sampled_drafts_have_the_distribution_that_they_were_sampled_from(drafting: Model) -> None:
    assert len(sampled_drafts(drafting, drafting.tokenizer.encode(PROMPT))) == 20


def test_trees_are_verified_and_change_nothing(path: Path, draft: Path, plain: Model) -> None:
    expected = plain.generate(PROMPT, **GREEDY)
    with edgeinfer.load(path, draft=draft, draft_tree_width=2, **CPU) as model:
        always_tree(model, 3, 8)
        actual = model.generate(PROMPT, **GREEDY)
        assert drafter_of(model).tree_width == 3
    assert actual.ids == expected.ids
    assert actual.speed.accepted_share is not None


def test_a_prompt_of_several_chunks_and_a_full_context(plain: Model, drafting: Model) -> None:
    always_draft(drafting, 4)
    ids = plain.tokenizer.encode(PROMPT * 9)[:240]
    expected, actual = (model.generate(ids, temperature=0.0) for model in (plain, drafting))
    assert actual.ids == expected.ids


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("kv", ["q8_0", "q4_0+f16"])
def test_a_drafter_has_the_cache_type_of_its_model(path: Path, draft: Path, kv: str) -> None:
    settings: dict[str, Any] = {**CPU, "kv": kv}
    with edgeinfer.load(path, draft=None, **settings) as model:
        expected = model.generate(PROMPT, **GREEDY).ids
    with edgeinfer.load(path, draft=draft, **settings) as model:
        always_draft(model, 4)
        assert model.generate(PROMPT, **GREEDY).ids == expected


def test_the_drafter_is_in_the_plan_with_the_bytes_that_it_takes(
    path: Path, draft: Path, drafting: Model
) -> None:
    assert drafting.plan is not None
    loaded = {(item.item, item.device): item.bytes for item in drafting.plan.items}
    planned = plan_model(path, draft=draft, **CPU).plan
    assert {(item.item, item.device): item.bytes for item in planned.items} == loaded
    heads = sum(nbytes for (item, _), nbytes in loaded.items() if item.startswith("draft head"))
    assert heads == drafter_of(drafting).nbytes


def test_the_plan_counts_the_decoded_matrix_of_a_selector(tmp_path: Path, path: Path) -> None:
    small, large = (
        sum(item.bytes for item in plan_model(path, draft=draft.write(tmp_path / "d.gguf"), **CPU).plan.items)
        for draft in (RandomDFlash(selector_rank=16), RandomDFlash(selector_rank=48))
    )
    assert large - small == 4 * (48 - 16) * TARGET.width


def test_a_drafter_is_no_model(draft: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="a draft head, wanted a model"):
        edgeinfer.load(draft, device="cpu")
    assert str(support_of(draft)) == "nothing: it is a draft head, for --draft of its model"


@pytest.mark.parametrize("name", ["dflash-target-Q8_0", "dspark-target-Q8_0"])
def test_auto_finds_one_next_to_the_model(tmp_path: Path, name: str) -> None:
    path = TARGET.write(tmp_path / "target-Q4_K_M.gguf")
    RandomDFlash(rank=16 if "dspark" in name else 0).write(tmp_path / f"{name}.gguf")
    with edgeinfer.load(path, **CPU) as model:
        assert isinstance(drafter_of(model), BlockDrafter)
        assert any(line.startswith("drafting with block drafter: ") for line in model.details)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (RandomDFlash(width=128), "embedding_length: 128, wanted 64, that of the model"),
        (
            RandomDFlash(target_layers=(1, 9)),
            r"target_layers: \[1, 9\], wanted numbers of layers, each up to 4",
        ),
        (RandomDFlash(missing=("fc.weight",)), "fc.weight is missing"),
        (RandomDFlash(missing=("blk.1.attn_k.weight",)), r"blk\.1\.attn_k\.weight is missing"),
        (RandomDFlash(rank=16, missing=("markov_w2.weight",)), r"markov_w2\.weight is missing"),
        (RandomDFlash(rows=8, missing=("output.weight",)), r"d2t without output\.weight"),
        (RandomDFlash(extra={"block_size": 1}), "block_size: 1, wanted"),
        (RandomDFlash(extra={"hidden_activation": "relu"}), "hidden_activation: 'relu', wanted one of"),
        (RandomDFlash(extra={"hyper_connection_count": 4}), "doesn't run drafters with hyper-connections"),
        (
            RandomDFlash(selector_rank=16, extra={"conv_group_size": 24}),
            "conv_group_size: 24, wanted a multiple",
        ),
        (RandomDFlash(selector_rank=16, with_post_norms=True), "a selector and norms after attention"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, path: Path, wrong: RandomDFlash, message: str
) -> None:
    with pytest.raises(SettingError, match=rf"^draft: wrong\.gguf: .*{message}") as caught:
        edgeinfer.load(path, draft=wrong.write(tmp_path / "wrong.gguf"), **CPU)
    assert "\n" not in str(caught.value)


def test_what_runs_on_the_cpu_only_is_left_out_with_one_line_next_to_a_gpu(path: Path, draft: Path) -> None:
    planned = plan_model(path, draft=draft, device="rtx 4090", context=256)
    lines = [line for line in planned.warnings if "or a selector) runs on the CPU only" in line]
    with GGUFFile.open(draft) as file:
        needs_cpu = any(name in file.tensors for name in ("markov_w1.weight", "selector_hidden.weight"))
    assert len(lines) == needs_cpu
    assert planned.plan.draft == (None if needs_cpu else "gpu")


def test_tensor_parallel_leaves_a_drafter_out_with_one_line(tmp_path: Path) -> None:
    wide = replace(TARGET, width=256, head_dim=64, feed_forward=512, formats=("Q8_0",))
    path = wide.write(tmp_path / "model.gguf")
    draft = RandomDFlash(width=256, head_dim=64).write(tmp_path / "draft.gguf")
    planned = plan_model(path, draft=draft, device="2x rtx 4090, nvlink", split="tensor", context=256)
    assert planned.plan.draft is None
    assert sum("tensor parallel has no block drafters" in line for line in planned.warnings) == 1
