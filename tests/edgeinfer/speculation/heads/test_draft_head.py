"""Draft heads (MTP) of a model's file: drafts change the speed of a completion and nothing else."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.engine.hidden_states import RESUMED_TOKENS, HiddenStep
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import SettingError, UnsupportedModelError
from edgeinfer.loading.draft_file import DraftTarget, open_draft
from edgeinfer.model_config.weights import read_config
from edgeinfer.planning.model_plan import plan_model
from edgeinfer.registry.registry import find_model
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.drafter import ChainedDrafter, DraftRequest
from edgeinfer.speculation.heads import draft_head
from edgeinfer.speculation.heads.draft_head import DraftHead
from edgeinfer.speculation.heads.observed_states import TAIL, ObservedStates
from edgeinfer.speculation.prompt_lookup import PromptLookup
from edgeinfer_kernels.blocks.embedding.draft_input import HEAD_BATCH
from edgeinfer_kernels.cpu.backend import CpuBackend
from edgeinfer_quant_formats import GGUFFile
from tests.edgeinfer.conftest import ZooFile
from tests.edgeinfer.speculation.heads.drafting_models import CPU, GREEDY, drafter_of, sampled_drafts
from tests.edgeinfer.speculation.heads.random_heads import nemotron_head
from tests.edgeinfer.speculation.test_drafting import always_draft
from tests.edgeinfer.speculation.test_tree import always_tree
from tests.model_zoo import ZOO
from tests.random_models import RandomModel

PROMPT = "Once upon a time, there was a little fox."
STORY = "Once upon a time, there was a little girl named Lily."
WITH_LOOP = RandomModel("arcee", layers=2, draft_head=True, context=256, formats=("Q8_0",))
"""Its embedding can be decoded by a kernel, so that the draft loop runs."""


@pytest.fixture(scope="module", params=["qwen35-draft-head", "glm4moe", "nemotron_h_moe", "loop"])
def path(request: pytest.FixtureRequest, zoo_file: ZooFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "loop":
        return WITH_LOOP.write(tmp_path_factory.mktemp("loop") / "loop.gguf")
    if request.param == "nemotron_h_moe":
        return nemotron_head().write(tmp_path_factory.mktemp("nemotron") / "nemotron.gguf")
    return zoo_file(request.param)


@pytest.fixture(scope="module")
def drafting(path: Path) -> Iterator[Model]:
    with edgeinfer.load(path, draft="mtp", **CPU) as model:
        assert isinstance(drafter_of(model), DraftHead)
        yield model


@pytest.mark.default_cases(6)
@pytest.mark.parametrize("length", [1, 4, 7])
@pytest.mark.parametrize("settings", [{}, {"repeat_penalty": 1.3}, {"temperature": 0.9, "seed": 3}])
def test_completions_equal_baseline_decoding(
    plain: Model, drafting: Model, settings: dict[str, Any], length: int
) -> None:
    always_draft(drafting, length)
    expected, actual = (model.generate(PROMPT, **{**GREEDY, **settings}) for model in (plain, drafting))
    assert actual.ids == expected.ids
    assert actual.speed.accepted_share is not None


def test_auto_uses_the_head_of_the_file(path: Path) -> None:
    with edgeinfer.load(path, **CPU) as model:
        assert isinstance(drafter_of(model), DraftHead)
        assert any(line.startswith("drafting with draft head: ") for line in model.details)


def test_a_prompt_of_several_chunks_and_a_full_context(plain: Model, drafting: Model) -> None:
    always_draft(drafting, 4)
    ids = plain.tokenizer.encode(PROMPT * 9)[:240]
    expected, actual = (model.generate(ids, temperature=0.0) for model in (plain, drafting))
    assert actual.ids == expected.ids
    assert len(drafting.engine.ids) <= 256


def test_an_idle_head_processes_nothing_and_drafts_again_after_the_last_tokens(
    plain: Model, drafting: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_head, "IDLE_STEPS", 10)
    monkeypatch.setattr(NativeEngine, "pause_hidden", lambda *_: None)  # as where lookup drafts all tokens
    starts: list[int] = []
    monkeypatch.setattr(CpuBackend, "set_hidden", lambda _, states, start: starts.append(start))
    expected = plain.generate(PROMPT, max_tokens=200, temperature=0.0)
    always_draft(drafting, 4)
    assert drafting.speculator is not None
    for controller in drafting.speculator.controllers.values():
        controller.cooldown_tokens = 150
    first = drafting.generate(PROMPT, max_tokens=150, temperature=0.0)
    assert not starts
    second = drafting.generate([*first.prompt_ids, *first.ids], max_tokens=50, temperature=0.0)
    assert [*first.ids, *second.ids] == expected.ids
    assert 0 <= starts[0] <= HEAD_BATCH


def test_in_a_long_pause_only_the_last_hidden_states_are_handed_out(
    plain: Model, drafting: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    added, add = list[int](), ObservedStates.add

    def counted(self: ObservedStates, ids: Sequence[int], states: Sequence[Any]) -> None:
        added.extend(ids)
        add(self, ids, states)

    monkeypatch.setattr(ObservedStates, "add", counted)
    always_draft(drafting, 4)
    assert drafting.speculator is not None
    for controller in drafting.speculator.controllers.values():
        controller.cooldown_tokens = 100
    paused = drafting.generate(PROMPT, max_tokens=100, temperature=0.0)
    assert added == paused.ids[-RESUMED_TOKENS - 1 : -1]
    text = [*paused.prompt_ids, *paused.ids]
    expected, actual = (model.generate(text, **GREEDY) for model in (plain, drafting))
    assert actual.ids == expected.ids
    assert actual.speed.accepted_share is not None


def test_a_prefix_is_reused_and_streams_alternate(plain: Model, drafting: Model) -> None:
    always_draft(drafting, 3)
    prompts = (PROMPT, "Tom and his dog went to the park.", PROMPT + " It had")
    expected = [plain.generate(prompt, **GREEDY).ids for prompt in prompts]
    for prompt, ids in zip(prompts, expected, strict=True):
        assert drafting.generate(prompt, **GREEDY).ids == ids
    streams = [drafting.stream(prompt, **GREEDY) for prompt in prompts]
    for _ in range(40):
        for stream in streams:
            next(stream, None)
    assert [stream.result.ids for stream in streams] == expected


def test_several_completions_at_once_need_no_drafts(plain: Model, drafting: Model) -> None:
    prompts = [PROMPT, "Tom had a ball."]
    expected, actual = ([each.ids for each in m.generate(prompts, **GREEDY)] for m in (plain, drafting))
    assert actual == expected


def test_a_restored_snapshot_is_continued(plain: Model, drafting: Model) -> None:
    always_draft(drafting, 4)
    expected = plain.generate(PROMPT, **GREEDY)
    drafting.generate(PROMPT, **GREEDY)
    snapshot = drafting.engine.snapshot()
    assert snapshot is not None
    kept = replace(snapshot, ids=list(snapshot.ids), arrays=[array.copy() for array in snapshot.arrays])
    drafting.generate("Something else, which is much longer than the text before it.", **GREEDY)
    drafting.engine.restore(kept, len(kept.ids))
    assert drafting.generate(PROMPT, **GREEDY).ids == expected.ids


def test_memory_mapped_weights_give_the_same_completion(path: Path, plain: Model) -> None:
    with edgeinfer.load(path, draft="mtp", repack=False, **CPU) as model:
        always_draft(model, 4)
        assert model.generate(PROMPT, **GREEDY).ids == plain.generate(PROMPT, **GREEDY).ids


def test_the_head_is_in_the_plan_with_the_bytes_that_it_takes(path: Path, drafting: Model) -> None:
    assert drafting.plan is not None
    loaded = {(item.item, item.device): item.bytes for item in drafting.plan.items}
    planned = plan_model(path, draft="mtp", **CPU).plan
    assert {(item.item, item.device): item.bytes for item in planned.items} == loaded
    assert loaded["draft head", "cpu"] == drafter_of(drafting).nbytes


def test_drafting_one_by_one_equals_the_draft_loop(drafting: Model) -> None:
    drafter = drafter_of(drafting)
    if not drafter.max_prompt:
        pytest.skip("the embedding of this model has no kernel")
    ids = drafting.tokenizer.encode(PROMPT)
    request = DraftRequest(5, SamplingParams(temperature=0.0))
    drafting.engine.rewind(0)
    drafting.engine.append(ids[:-1])
    native = drafter.propose(ids, request)
    drafter.max_prompt, count = 0, drafter.max_prompt
    single = drafter.propose(ids, request)
    drafter.max_prompt = count
    assert len(native.ids) == 5
    assert native.ids == single.ids
    assert native.probs == pytest.approx(single.probs, rel=1e-4)


def test_a_model_without_a_head_is_refused_in_one_line(zoo_file: ZooFile) -> None:
    with pytest.raises(SettingError, match="'mtp' needs a draft head") as caught:
        edgeinfer.load(zoo_file("llama"), draft="mtp", device="cpu")
    assert "\n" not in str(caught.value)


def test_a_head_with_an_unknown_tensor_gives_prompt_lookup_and_a_detail(tmp_path: Path) -> None:
    class Strange(RandomModel):
        def tensors(self) -> dict[str, tuple[int, ...]]:
            return {**super().tensors(), f"blk.{self.layers}.nextn.strange.weight": (64,)}

    path = Strange("arcee", layers=2, draft_head=True).write(tmp_path / "strange.gguf")
    with edgeinfer.load(path, **CPU) as model:
        assert isinstance(drafter_of(model), PromptLookup)
        assert any("nextn.strange" in line for line in model.details)
    with pytest.raises(SettingError, match="strange"):
        edgeinfer.load(path, draft="mtp", **CPU)


def test_a_plan_has_the_head_on_a_gpu_that_holds_the_model_and_on_no_other(path: Path) -> None:
    machine: dict[str, Any] = {"device": "rtx 4090, 64 GiB", "context": 256}
    planned = plan_model(path, draft="mtp", **machine)
    items = {item.item: item for item in planned.plan.items}
    assert (planned.plan.draft, items["draft head"].device) == ("gpu", "gpu")
    assert not any("draft head" in line for line in planned.warnings)
    assert plan_model(path, draft="auto", **machine).plan.draft == "gpu"
    vram = planned.plan.bytes_on("gpu") - 1
    without = plan_model(path, draft="mtp", vram=vram, **machine)
    assert (without.plan.draft, without.plan.device) == (None, "gpu")
    assert any("too little memory for the draft head" in line for line in without.warnings)
    automatic = plan_model(path, draft="auto", vram=vram, **machine)
    assert (automatic.plan.draft, automatic.plan.device) == (None, "gpu")
    assert not any("draft head" in line for line in automatic.warnings)


def step(start: int, text: Sequence[int], width: int = 2) -> HiddenStep:
    """The step of the tokens from `start` on; the state of token t is (t, -t)."""
    ids = list(text[start:])
    return HiddenStep(start, ids, list(text), [np.array([[each, -each] for each in ids], np.float32)])


def observed(states: ObservedStates, start: int, text: Sequence[int]) -> int:
    kept = states.begin(made := step(start, text))
    states.add(made.ids, made.states)
    return kept


def test_observed_states_follow_the_text() -> None:
    states, text = ObservedStates(100, 2), list(range(10, 50))
    assert observed(states, 0, text[:20]) == 0
    assert observed(states, 20, text) == 20
    assert states.last_before([*text, 5]) == 39
    assert states.states(38, 40).view[:, 0].tolist() == [48, 49]
    # A rewind, and another token.
    assert observed(states, 30, [*text[:30], 7]) == 30
    assert states.last_before([*text[:30], 7, 5]) == 30
    assert states.last_before([*text[:30], 8, 5]) is None
    assert states.following(28, 30) == [39, 7]


def test_observed_states_of_another_text_begin_with_its_step() -> None:
    states = ObservedStates(100, 2)
    observed(states, 0, list(range(10, 50)))
    other = list(range(200, 250))
    assert observed(states, 40, other) == 0
    assert (states.base, states.end) == (40, 10)
    assert states.last_before([*other, 1]) == 9
    assert states.last_before(other[:41]) is None
    # Texts that differ only before the compared tokens count as one.
    changed = [0] * (50 - TAIL - 1) + other[50 - TAIL - 1 :]
    assert states.last_before([*changed, 1]) == 9


def test_dropped_states_are_not_read_again() -> None:
    states, text = ObservedStates(50, 2), list(range(10, 50))
    observed(states, 0, text)
    states.drop(38)
    assert states.free == 48
    assert states.states(38, 40).view[:, 0].tolist() == [48, 49]
    assert states.last_before(text[:38]) is None
    assert observed(states, 20, [*text[:20], 5, 6]) == 20
    assert states.states(20, 22).view[:, 0].tolist() == [5, 6]


TINY_HEAD = find_model("tiny").head_path


@pytest.fixture(scope="module")
def built_in() -> Iterator[Model]:
    """The built-in model with its draft head, which has a separate file."""
    with edgeinfer.load("tiny", draft="mtp", **CPU) as model:
        assert isinstance(drafter_of(model), DraftHead)
        yield model


@pytest.mark.slow
def test_the_built_in_head_drafts_what_the_model_writes(built_in: Model) -> None:
    always_draft(built_in, 3)
    speed = built_in.generate(STORY, max_tokens=80, temperature=0.0).speed
    assert speed.accepted_share is not None
    assert speed.accepted_share > 0.3
    assert speed.tokens_per_forward is not None
    assert speed.tokens_per_forward > 1.8


def test_a_head_file_is_a_draft_by_its_path_and_no_model(built_in: Model) -> None:
    assert TINY_HEAD is not None
    expected = built_in.generate(STORY, **GREEDY).ids
    with edgeinfer.load("tiny", draft=TINY_HEAD, **CPU) as model:
        assert isinstance(drafter_of(model), DraftHead)
        assert model.generate(STORY, **GREEDY).ids == expected
    with pytest.raises(UnsupportedModelError, match="a draft head, wanted a model"):
        edgeinfer.load(TINY_HEAD)


def test_a_head_of_another_model_is_refused_in_one_line(zoo_file: ZooFile) -> None:
    with pytest.raises(SettingError, match=r"draft head: architecture arcee, wanted llama") as caught:
        edgeinfer.load(zoo_file("llama"), draft=TINY_HEAD, **CPU)
    assert "\n" not in str(caught.value)


def test_auto_uses_the_registered_head_or_else_the_draft_model() -> None:
    model = find_model("tiny")
    with GGUFFile.open(model.path) as file:
        target = DraftTarget.of(model, file, read_config(file))
        for each, name in (
            (target, model.head_path),
            (replace(target, head_path=None), model.draft_path),
            (replace(target, draft_path=None, head_path=None), None),
        ):
            draft, warnings = open_draft("auto", each)
            assert warnings == ()
            assert (draft and draft.name) == (name and name.stem)
            if draft is not None:
                draft.close()


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["q8_0", "q4_0"])
def test_a_head_has_the_cache_type_of_its_model(kv: str) -> None:
    settings: dict[str, Any] = {**CPU, "kv": kv}
    with edgeinfer.load("tiny", draft=None, **settings) as plain:
        expected = plain.generate(STORY, **GREEDY).ids
    with edgeinfer.load("tiny", draft="mtp", **settings) as model:
        always_draft(model, 4)
        completion = model.generate(STORY, **GREEDY)
    assert completion.ids == expected
    assert completion.speed.accepted_share


@pytest.mark.slow
def test_lookup_files_come_before_the_head(built_in: Model, tmp_path: Path) -> None:
    expected = built_in.generate(STORY, max_tokens=60, temperature=0.0)
    path = tmp_path / "story.txt"
    path.write_text(STORY + expected.text[: len(expected.text) // 2], encoding="utf-8")
    with edgeinfer.load("tiny", draft="mtp", lookup_files=path, **CPU) as model:
        assert isinstance(drafter_of(model), ChainedDrafter)
        always_draft(model, 4)
        actual = model.generate(STORY, max_tokens=60, temperature=0.0)
    assert actual.ids == expected.ids
    assert actual.speed.tokens_per_forward is not None
    assert actual.speed.tokens_per_forward > 2


def test_sampled_drafts_have_the_distribution_that_they_were_sampled_from(built_in: Model) -> None:
    ids = built_in.tokenizer.encode(STORY)
    assert len(sampled_drafts(built_in, ids)) == 20


@pytest.fixture(scope="module")
def growing() -> Iterator[Model]:
    with edgeinfer.load("tiny", draft="mtp", draft_tree_width=3, **CPU) as model:
        yield model


@pytest.mark.slow
@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"temperature": 0.0, "repeat_penalty": 1.2}, {"seed": 5}]
)
def test_completions_with_trees_equal_baseline_decoding(
    built_in: Model, growing: Model, settings: dict[str, Any]
) -> None:
    always_tree(growing, 5, 12)
    always_draft(built_in, 5)
    forwards = [0.0, 0.0]
    for prompt in (STORY, "A small bird lived in"):
        pair = [model.generate(prompt, max_tokens=100, **settings) for model in (built_in, growing)]
        assert pair[0].ids == pair[1].ids
        for index, completion in enumerate(pair):
            assert completion.speed.tokens_per_forward is not None
            forwards[index] += len(completion.ids) / completion.speed.tokens_per_forward
    assert forwards[1] < 0.95 * forwards[0]


def test_the_first_path_of_a_tree_is_the_chain(growing: Model) -> None:
    ids, drafter = growing.tokenizer.encode(STORY), drafter_of(growing)
    growing.engine.rewind(0)
    growing.engine.append(ids[:-1])
    draft = drafter.propose(ids, DraftRequest(4, SamplingParams(temperature=0.0), max_nodes=15))
    assert draft.depth == 4
    assert len(draft.ids) == 15
    chain = drafter.propose(ids, DraftRequest(4, SamplingParams(temperature=0.0)))
    assert draft.chain.ids == chain.ids
    assert draft.chain.probs == pytest.approx(chain.probs, rel=1e-3)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", ["exaone4", "nemotron_h", "bailingmoe2", "exaone-moe", "glm4"])
def test_a_head_that_cannot_be_run_is_left_in_its_file_with_one_line(tmp_path: Path, name: str) -> None:
    path = replace(ZOO[name], draft_head=True).write(tmp_path / "model.gguf")
    with edgeinfer.load(path, **CPU) as model:
        assert isinstance(drafter_of(model), PromptLookup)
        assert len(model.generate(PROMPT, **GREEDY).ids) > 0
        (line,) = [each for each in model.details if "draft head" in each]
        assert line.endswith(f"doesn't know that of {name}")
