"""The built-in pair: drafts change the speed of a completion and nothing else."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.errors import SettingError
from edgeinfer.loading.draft_vocabulary import same_tokens
from edgeinfer.registry.registry import find_model
from edgeinfer.results import Generation
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.draft_controller import DraftController
from edgeinfer.speculation.draft_model import DraftModel
from edgeinfer.speculation.drafter import ChainedDrafter, DraftRequest
from edgeinfer.speculation.heads.draft_head import DraftHead
from edgeinfer.speculation.loop_drafter import draft_sampling
from edgeinfer.speculation.prompt_lookup import PromptLookup
from tests.edgeinfer.conftest import ZooFile

DRAFT_MODEL = find_model("tiny").draft_path

BaselineCompletion = Callable[[str, tuple[tuple[str, Any], ...]], Generation]
PROMPT = "Once upon a time, there was a little girl named Lily."
REPEATED = "Tom had a red ball. Sue had a red ball. Tom had a red ball. Sue had"
FABLE = 2 * (
    "Once upon a time there was a little fox who lived in a wood. One day the fox met a bear. "
    "The bear said: I am hungry. "
)


def draft_always(controller: DraftController, length: int) -> None:
    """Drafts of this length, as far as the rows of a forward allow, whatever their cost."""

    def lengths(limits: Sequence[int], acceptances: Sequence[float], rows: int) -> list[int]:
        longest = min(length, (rows - len(limits)) // len(limits))
        return [max(0, min(limit, longest)) for limit in limits]

    setattr(controller, "lengths", lengths)  # noqa: B010
    setattr(controller, "length", lambda limit: max(0, min(limit, length)))  # noqa: B010
    setattr(controller, "longest", lambda length, limit: length)  # noqa: B010
    setattr(controller, "min_probs", lambda length, texts=1: (0.0, 0.0))  # noqa: B010
    controller.cooldown_tokens = 0


def always_draft(model: Model, length: int) -> None:
    """Drafts of this length, whatever their cost."""
    assert model.speculator is not None
    for controller in model.speculator.controllers.values():
        draft_always(controller, length)


@pytest.fixture(scope="module")
def plain() -> Iterator[Model]:
    with edgeinfer.load("tiny", device="cpu", threads=1, draft=None, context=256) as model:
        yield model


@pytest.fixture(scope="module")
def baseline_completion(plain: Model) -> BaselineCompletion:
    """60 tokens after a prompt with some options, with which all drafts are compared."""
    return cache(lambda prompt, settings: plain.generate(prompt, max_tokens=60, **dict(settings)))


@pytest.fixture(scope="module", params=["auto", "mtp", "lookup", "self"])
def drafting(request: pytest.FixtureRequest) -> Iterator[Model]:
    with edgeinfer.load("tiny", device="cpu", threads=1, draft=request.param, context=256) as model:
        yield model


@pytest.mark.default_cases(2)
@pytest.mark.parametrize(
    "length", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(7, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "repeat_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 0.9, "seed": 4, "dry_multiplier": 0.8, "mirostat": 2},
    ],
)
def test_greedy_and_seeded_completions_equal_baseline_decoding(
    baseline_completion: BaselineCompletion, drafting: Model, settings: dict[str, Any], length: int
) -> None:
    always_draft(drafting, length)
    for prompt in (PROMPT, REPEATED):
        expected = baseline_completion(prompt, tuple(settings.items()))
        actual = drafting.generate(prompt, max_tokens=60, **settings)
        assert (actual.ids, actual.text, actual.finish_reason) == (
            expected.ids,
            expected.text,
            expected.finish_reason,
        )


def test_draft_tokens_are_marked_and_counted(drafting: Model) -> None:
    always_draft(drafting, 3)
    completion = drafting.generate(REPEATED, max_tokens=40, temperature=0.0)
    speed = completion.speed
    assert speed.accepted_share is not None
    assert speed.tokens_per_forward is not None
    drafted = sum(token.drafted for token in completion.tokens)
    assert (drafted > 0) == (speed.accepted_share > 0)
    assert 1 <= speed.tokens_per_forward <= 4
    assert completion.speed.generated_tokens == len(completion.ids) <= 40


@pytest.mark.default_cases(2)
def test_drafting_stops_at_the_end_of_the_context(plain: Model, drafting: Model) -> None:
    always_draft(drafting, 7)
    ids = plain.tokenizer.encode(PROMPT * 20)[:235]
    expected, actual = (model.generate(ids, temperature=0.0) for model in (plain, drafting))
    assert actual.ids == expected.ids
    assert actual.finish_reason == expected.finish_reason
    assert len(drafting.engine.ids) <= 256


@pytest.mark.default_cases(2)
def test_the_cache_holds_the_completion_for_the_next_message(plain: Model, drafting: Model) -> None:
    always_draft(drafting, 4)
    drafting.generate(PROMPT, max_tokens=30, temperature=0.0)
    completion = drafting.generate(PROMPT, max_tokens=30, temperature=0.0)
    assert completion.speed.cached_tokens >= len(completion.prompt_ids) - 1
    chats = [model.chat() for model in (plain, drafting)]
    for text in ("Hi", "And then?"):
        output = [chat.say(text, max_tokens=20, temperature=0.0).ids for chat in chats]
        assert output[0] == output[1]


@pytest.mark.default_cases(1)
def test_two_streams_of_one_model_may_alternate(plain: Model, drafting: Model) -> None:
    always_draft(drafting, 4)
    prompts = (PROMPT, "Tom and his dog went to the park.")
    expected = [plain.generate(prompt, max_tokens=25, temperature=0.0).ids for prompt in prompts]
    streams = [drafting.stream(prompt, max_tokens=25, temperature=0.0) for prompt in prompts]
    for _ in range(40):
        for stream in streams:
            next(stream, None)
    assert [stream.result.ids for stream in streams] == expected


def test_logprobs_equal_baseline_decoding(plain: Model, drafting: Model) -> None:
    always_draft(drafting, 4)
    expected, actual = (
        m.generate(PROMPT, max_tokens=20, temperature=0.0, logprobs=2) for m in (plain, drafting)
    )
    assert [(t.id, t.logprob, t.top_logprobs) for t in actual.tokens] == [
        (t.id, t.logprob, t.top_logprobs) for t in expected.tokens
    ]


def test_unseeded_sampling_accepts_most_draft_tokens() -> None:
    with edgeinfer.load("tiny", draft=DRAFT_MODEL, device="cpu", threads=1, context=256) as model:
        always_draft(model, 3)
        shares = [
            model.generate(PROMPT, max_tokens=60, temperature=0.8).speed.accepted_share or 0.0
            for _ in range(3)
        ]
        assert max(shares) > 0.5


def test_auto_uses_the_registered_head_or_prompt_lookup(zoo_file: ZooFile) -> None:
    for model, kind in (("tiny", DraftHead), (zoo_file("llama"), PromptLookup)):
        with edgeinfer.load(model, device="cpu", threads=1) as loaded:
            assert loaded.speculator is not None
            assert isinstance(loaded.speculator.drafter, kind)


def test_loading_measures_forward_and_draft_costs_and_leaves_the_cache_empty() -> None:
    with edgeinfer.load("tiny", device="cpu", threads=1) as model:
        assert model.engine.ids == []
        assert model.speculator is not None
        assert model.speculator.controllers["sampled"].min_probs(1)[1] > 0


def test_auto_reports_the_cost_of_the_draft() -> None:
    with edgeinfer.load("tiny", device="cpu", threads=1) as model:
        assert model.speculator is not None
        megabytes = f"{model.speculator.drafter.nbytes / 1e6:.0f} MB of main memory"
        assert [line for line in model.details if line.startswith("drafting with")] == [
            f"drafting with draft head: {megabytes} (draft=None leaves it out)"
        ]


@pytest.mark.slow
def test_a_draft_of_another_vocabulary_falls_back_to_prompt_lookup_with_a_warning(zoo_file: ZooFile) -> None:
    with edgeinfer.load("tiny", device="cpu", threads=1, draft=str(zoo_file("llama"))) as model:
        message = "draft: llama has 288 tokens, the model 8192; wanted the same vocabulary"
        assert f"using prompt lookup instead of the draft model: {message}" in model.warnings
        assert model.speculator is not None
        assert model.speculator.drafter.name == "lookup"
        assert model.plan is not None
        assert model.plan.draft is None


def listed(kind: str, tokens: list[str], types: list[int]) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
    }


def test_vocabularies_with_a_common_prefix_are_compatible() -> None:
    model = listed("gpt2", ["a", "b", "c"], [1, 1, 3])
    assert same_tokens(model, model)
    padded = listed("gpt2", [*model["tokenizer.ggml.tokens"], "pad"], [1, 1, 3, 5])
    assert same_tokens(padded, model)
    assert same_tokens(model, padded)
    for other in (
        listed("llama", ["a", "b", "c"], [1, 1, 3]),
        listed("gpt2", ["a", "x", "c"], [1, 1, 3]),
        listed("gpt2", ["a", "b", "c"], [1, 1, 1]),
        listed("gpt2", ["a", "b", "c", *map(str, range(2000))], [1] * 2003),
    ):
        assert not same_tokens(model, other)
        assert not same_tokens(other, model)


def test_an_unsupported_draft_gives_a_one_line_error(tmp_path: Path) -> None:
    path = tmp_path / "draft.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(Exception, match=r"draft\.gguf") as caught:
        edgeinfer.load("tiny", device="cpu", threads=1, draft=str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_budget_too_small_for_both_omits_the_draft() -> None:
    with edgeinfer.load("tiny", device="cpu", threads=1, draft=None) as model:
        assert model.plan is not None
        needed = model.plan.nbytes
    with edgeinfer.load("tiny", device="cpu", threads=1, ram=needed + 1000) as model:
        assert any("using prompt lookup instead" in line for line in model.details)
        assert model.warnings == ()
        assert model.generate(PROMPT, max_tokens=3, temperature=0.0).ids


@pytest.mark.slow
def test_lookup_files_give_drafts(plain: Model, tmp_path: Path) -> None:
    expected = plain.generate(PROMPT, max_tokens=60, temperature=0.0)
    path = tmp_path / "story.txt"
    path.write_text(PROMPT + expected.text, encoding="utf-8")
    for draft, kind in (("lookup", PromptLookup), ("auto", ChainedDrafter)):
        with edgeinfer.load(
            "tiny", device="cpu", threads=1, draft=draft, lookup_files=path, context=256
        ) as model:
            assert model.speculator is not None
            assert isinstance(model.speculator.drafter, kind)
            always_draft(model, 6)
            actual = model.generate(PROMPT, max_tokens=60, temperature=0.0)
            assert actual.ids == expected.ids
            assert actual.speed.tokens_per_forward is not None
            assert actual.speed.tokens_per_forward > 3


def test_unreadable_lookup_files_give_a_one_line_error(tmp_path: Path) -> None:
    path = tmp_path / "picture.bin"
    path.write_bytes(b"ab\xff\xfe")
    with pytest.raises(SettingError, match=r"byte 2 of .*picture\.bin isn't UTF-8"):
        edgeinfer.load("tiny", device="cpu", threads=1, lookup_files=[path])
    with pytest.raises(FileNotFoundError):
        edgeinfer.load("tiny", device="cpu", threads=1, lookup_files=[tmp_path / "nothing.txt"])
    with pytest.raises(SettingError, match="used only by drafts"):
        edgeinfer.load("tiny", device="cpu", threads=1, lookup_files=[path], draft=None)


def test_the_first_drafter_with_a_draft_is_used() -> None:
    lookups = [PromptLookup([[1, 2, 3, 4]]), PromptLookup([[1, 2, 9, 9], [5, 6, 7]])]
    drafter, settings = ChainedDrafter(lookups), SamplingParams()
    assert drafter.propose([1, 2], DraftRequest(1, settings)).ids == (3,)
    assert drafter.propose([5, 6], DraftRequest(1, settings)).ids == (7,)
    assert drafter.propose([8, 8, 0], DraftRequest(1, settings)).ids == ()
    assert drafter.nbytes == sum(lookup.nbytes for lookup in lookups)


def test_a_draft_model_alternates_with_the_target_threads() -> None:
    with edgeinfer.load("tiny", draft=DRAFT_MODEL, device="cpu", threads=1) as model:
        assert model.speculator is not None
        drafter = model.speculator.drafter
        assert isinstance(drafter, DraftModel)
        own, theirs = (engine.backend for engine in (drafter.engine, model.engine))  # type: ignore[attr-defined]
        assert own.pool is theirs.pool
        own.close()
        assert model.engine.append([5]).shape == (model.engine.vocabulary_size,)


def proposed(drafter: Any, settings: SamplingParams, natively: bool, texts: list[list[int]]) -> list[Any]:
    """The drafts after some texts, made by the draft loop or one by one."""
    drafter.max_prompt, max_prompt = (16 if natively else 0), drafter.max_prompt
    try:
        return [drafter.propose(text, DraftRequest(5, settings, 0.0, 0.2)) for text in texts]
    finally:
        drafter.max_prompt = max_prompt


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"temperature": 0.7, "seed": 5, "top_p": 1.0, "top_k": 20}]
)
def test_the_draft_loop_equals_single_draft_steps(settings: dict[str, Any]) -> None:
    requested = SamplingParams(**settings)
    with edgeinfer.load("tiny", draft=DRAFT_MODEL, device="cpu", threads=1, context=256) as model:
        assert model.speculator is not None
        drafter: Any = model.speculator.drafter
        assert drafter.max_prompt == 16
        ids = model.tokenizer.encode(FABLE)
        # A whole text, some tokens more, one less, another one: all cases of a shared prefix with the cache.
        # There are fewer tokens than AMX kernels process, which round differently.
        texts = [ids[10:30], ids[10:33], ids[10:32], ids[5:25], ids[:1]]
        native, single = (proposed(drafter, requested, natively, texts) for natively in (True, False))
        assert any(len(draft.ids) == 5 for draft in native)
        assert any(len(draft.ids) < 5 for draft in native)
        for one, other in zip(native, single, strict=True):
            assert one.ids == other.ids
            assert one.probs == pytest.approx(other.probs, rel=1e-4)
            assert one.distributions is None


def test_sampled_drafts_include_their_distribution() -> None:
    with edgeinfer.load("tiny", draft=DRAFT_MODEL, device="cpu", threads=1, context=256) as model:
        assert model.speculator is not None
        ids = model.tokenizer.encode(PROMPT)
        drafts = [
            model.speculator.drafter.propose(ids, DraftRequest(3, SamplingParams(temperature=1.5)))
            for _ in range(20)
        ]
        assert len({draft.ids for draft in drafts}) > 1
        for draft in drafts:
            assert draft.distributions is not None
            for token, word, (candidates, probs) in zip(
                draft.ids, draft.probs, draft.distributions, strict=True
            ):
                assert probs.sum() == pytest.approx(1.0)
                position = candidates.tolist().index(token)
                if len(candidates) > 1:
                    assert word == pytest.approx(float(probs[position]), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "simple"),
    [
        ({"temperature": 0.0, "xtc_probability": 0.5, "mirostat": 2}, True),  # nothing is sampled
        ({"temperature": 0.8}, True),
        ({"temperature": 0.0, "repeat_penalty": 1.1}, False),
        ({"temperature": 0.8, "top_n_sigma": 1.0}, False),
        ({"temperature": 0.8, "typical_p": 0.9}, False),
        ({"temperature": 0.8, "xtc_probability": 0.5}, False),
        ({"temperature": 0.8, "mirostat": 2}, False),
        ({"temperature": 0.8, "dry_multiplier": 0.8}, False),
        ({"temperature": 0.8, "logit_bias": {3: 1.0}}, False),
    ],
)
def test_only_simple_sampling_parameters_run_in_the_draft_loop(
    settings: dict[str, Any], simple: bool
) -> None:
    assert (draft_sampling(SamplingParams(**settings)) is not None) == simple
