"""Loading a model with its draft head on a described GPU: completions are those without drafts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.engine import draft_verification
from edgeinfer.engine.device_sampling import sample_after_each
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import SettingError
from edgeinfer.loading import gpu_loading
from edgeinfer.planning.gpu_selection import GpuUnavailableError
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.draft_costs import MeasuredCosts
from edgeinfer.speculation.drafter import DraftRequest
from edgeinfer.speculation.heads.draft_head import DraftHead
from edgeinfer.speculation.prompt_lookup import PromptLookup
from edgeinfer.speculation.speculator import Speculator
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.draft.verification.started_step import StartedVerification
from harness.drafts.comparison import DraftSuite
from harness.drafts.head_tables import planted_head
from harness.drafts.timed_drafts import AGREEMENTS
from tests.edgeinfer.speculation.heads.head_files import split_heads
from tests.edgeinfer.speculation.heads.random_heads import nemotron_head
from tests.edgeinfer.speculation.test_drafting import always_draft
from tests.edgeinfer.speculation.test_tree import always_tree
from tests.kernels.cuda.offload.conftest import small_gpu as small_gpu
from tests.model_zoo import ZOO
from tests.random_models import RandomModel

GPU: dict[str, Any] = {"context": 96, "threads": 1, "device": "cuda"}
GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0}
IDS = [5, 9, 30, 7, 11, 5, 9]
WITH_HEAD = RandomModel("arcee", layers=1, draft_head=True, formats=("Q8_0",))
RECURRENT = replace(ZOO["qwen35-draft-head"], formats=("Q8_0",))


@pytest.fixture
def unmeasured(
    small_gpu: Callable[[int], None], float32_products: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that everything fits. Measuring takes minutes where kernels are interpreted."""
    small_gpu(1 << 40)
    monkeypatch.setattr(Speculator, "measure", lambda self: MeasuredCosts({1: 1.0}))


def drafter_of(model: Model) -> Any:
    assert model.speculator is not None
    return model.speculator.drafter


def check_sampled_drafts(model: Model) -> None:
    """The device verifies sampled drafts, with the tokens that the host samples."""
    settings: dict[str, Any] = {"max_tokens": 4, "temperature": 1.5, "top_k": 12, "seed": 4}
    sample, sampled = sample_after_each, list[list[int]]()

    def recorded(*arguments: Any) -> list[int]:
        sampled.append(sample(*arguments))
        return sampled[-1]

    with pytest.MonkeyPatch.context() as change:
        change.setattr(draft_verification, "sample_after_each", recorded)
        model.engine.rewind(0)
        found = model.generate(IDS, **settings).ids
        assert sampled
        assert min(map(min, sampled)) >= 0
        change.setattr(draft_verification, "samples_on", lambda *_: False)
        model.engine.rewind(0)
        assert model.generate(IDS, **settings).ids == found


TEXTS = [IDS, [*IDS, 40, 41], [8, 8, 3] * 10]
"""A longer text continues the first one, and the third begins another."""


def check_drafts_of_each_text(
    path: Path, draft: str | Path, kind: type[Any], texts: Sequence[list[int]] = TEXTS
) -> None:
    """The completions of texts with a drafter of this kind are those without, and its bytes are planned."""
    with edgeinfer.load(path, draft=None, **GPU) as plain:
        expected = [plain.generate(ids, **GREEDY).ids for ids in texts]
    with edgeinfer.load(path, draft=draft, **GPU) as model:
        drafter, engine = drafter_of(model), model.engine
        assert isinstance(drafter, kind)
        assert isinstance(engine, NativeEngine)
        assert isinstance(engine.backend, CudaBackend)
        assert model.plan is not None
        planned = {(item.item, item.device): item.bytes for item in model.plan.items}
        assert planned["draft head", "gpu"] == drafter.nbytes
        always_draft(model, 3)
        for ids, wanted in zip(texts, expected, strict=True):
            completion = model.generate(ids, **GREEDY)
            assert completion.ids == wanted
            assert completion.speed.accepted_share is not None


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
def test_completions_equal_baseline_decoding_and_the_head_follows_the_text(tmp_path: Path) -> None:
    check_drafts_of_each_text(WITH_HEAD.write(tmp_path / "model.gguf"), "mtp", DraftHead)


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
def test_a_head_in_a_separate_file_is_that_of_the_whole_file(tmp_path: Path) -> None:
    whole = WITH_HEAD.write(tmp_path / "whole.gguf")
    path, heads = split_heads(whole, tmp_path / "model.gguf", tmp_path / "mtp-model.gguf")
    sizes = []
    for model_path, draft in ((whole, "mtp"), (path, heads), (path, "mtp")):
        with edgeinfer.load(model_path, draft=draft, **GPU) as model:
            assert isinstance(drafter_of(model), DraftHead)
            always_draft(model, 3)
            completion = model.generate(IDS, **GREEDY)
            sizes.append((drafter_of(model).nbytes, completion.ids, completion.speed.accepted_share))
    assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
def test_sampled_completions_take_the_most_probable_drafts(tmp_path: Path) -> None:
    path = WITH_HEAD.write(tmp_path / "model.gguf")
    seeded: dict[str, Any] = {"max_tokens": 8, "temperature": 0.9, "seed": 3}
    with edgeinfer.load(path, draft=None, **GPU) as plain:
        expected = plain.generate(IDS, **seeded).ids
        penalized = plain.generate(IDS, repeat_penalty=1.3, **GREEDY).ids
    with edgeinfer.load(path, draft="mtp", **GPU) as model:
        always_draft(model, 3)
        assert model.generate(IDS, **seeded).ids == expected
        assert model.generate(IDS, repeat_penalty=1.3, **GREEDY).ids == penalized
        assert len(model.generate(IDS, max_tokens=4, temperature=0.9).ids) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
def test_tokens_that_the_gpu_samples_ahead_are_observed(tmp_path: Path) -> None:
    path = WITH_HEAD.write(tmp_path / "model.gguf")
    with edgeinfer.load(path, draft="mtp", **GPU) as model:
        engine, drafter = model.engine, drafter_of(model)
        speculator, model.speculator = model.speculator, None
        completion = model.generate(IDS[1:], **GREEDY)
        text = [*IDS[1:], *completion.ids]
        model.speculator = speculator
        assert engine.ids == text[:-1]
        request = DraftRequest(3, SamplingParams(temperature=0.0))
        after = drafter.propose(text, request)
        engine.rewind(0)
        engine.append(text[:-1])
        assert drafter.propose(text, request).ids == after.ids
        assert len(after.ids) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("name", ["qwen35-draft-head", "glm4moe", "nemotron_h_moe"])
def test_heads_of_recurrent_and_moe_models_change_no_completion(tmp_path: Path, name: str) -> None:
    with_head = nemotron_head() if name == "nemotron_h_moe" else ZOO[name]
    path = replace(with_head, formats=("Q8_0",)).write(tmp_path / "model.gguf")
    with edgeinfer.load(path, draft=None, **GPU) as plain:
        expected = plain.generate(IDS, **GREEDY).ids
    with edgeinfer.load(path, draft="mtp", **GPU) as model:
        assert isinstance(drafter_of(model), DraftHead)
        always_draft(model, 3)
        assert model.generate(IDS, **GREEDY).ids == expected
        kept = model.engine.snapshot()
        assert kept is not None
        snapshot = replace(kept, ids=list(kept.ids), arrays=[array.copy() for array in kept.arrays])
        model.generate([3, 4, 5, 6], **GREEDY)
        model.engine.restore(snapshot, len(snapshot.ids))
        assert model.generate(IDS, **GREEDY).ids == expected


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
def test_auto_drafts_on_a_gpu_with_a_head_of_the_file_that_fits_there(
    tmp_path: Path, small_gpu: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = WITH_HEAD.write(tmp_path / "model.gguf")
    with edgeinfer.load(path, **GPU) as model:
        assert isinstance(drafter_of(model), DraftHead)
        assert model.plan is not None
        needed = model.plan.bytes_on("gpu")
    small_gpu(needed - 1)
    with edgeinfer.load(path, **GPU) as model:
        assert model.speculator is None
        assert not any("draft head" in line for line in model.warnings)
    small_gpu(1 << 40)

    def failing(*_: Any, **__: Any) -> Any:
        raise GpuUnavailableError("no memory")

    with monkeypatch.context() as change:
        change.setattr(gpu_loading, "load_gpu_heads", failing)
        with edgeinfer.load(path, **GPU) as model:
            assert model.speculator is None
            assert any("drafting is off" in line for line in model.warnings)
            assert model.generate(IDS, **GREEDY).ids
        with pytest.raises(SettingError, match="no memory"):
            edgeinfer.load(path, draft="mtp", **GPU)
    without = replace(WITH_HEAD, draft_head=False).write(tmp_path / "without.gguf")
    with edgeinfer.load(without, **GPU) as model:
        assert model.speculator is None


def test_a_gpu_without_memory_for_the_head_gives_prompt_lookup_and_a_warning(
    tmp_path: Path, small_gpu: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speculator, "measure", lambda self: MeasuredCosts({1: 1.0}))
    path = WITH_HEAD.write(tmp_path / "model.gguf")
    small_gpu(1 << 40)
    with edgeinfer.load(path, draft="mtp", **GPU) as model:
        assert model.plan is not None
        needed = model.plan.bytes_on("gpu")
    small_gpu(needed - 1)
    with edgeinfer.load(path, draft="mtp", **GPU) as model:
        assert isinstance(drafter_of(model), PromptLookup)
        assert any("too little memory for the draft head" in line for line in model.warnings)


@pytest.mark.usefixtures("unmeasured")
def test_a_drafter_that_reads_states_on_the_host_is_refused_next_to_a_gpu(tmp_path: Path) -> None:
    class Reader(edgeinfer.Drafter):
        hidden_layers = (-1,)

        def propose(self, history: Any, request: Any) -> edgeinfer.Draft:
            return edgeinfer.Draft()

    with pytest.raises(SettingError, match="run on the CPU only"):
        edgeinfer.load(WITH_HEAD.write(tmp_path / "model.gguf"), draft=Reader(), **GPU)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("target", "settings"),
    [
        (WITH_HEAD, GREEDY),
        (WITH_HEAD, {"max_tokens": 6, "temperature": 0.9, "seed": 3}),
        pytest.param(RECURRENT, GREEDY, marks=pytest.mark.slow),
        pytest.param(RECURRENT, {**GREEDY, "temperature": 0.9, "seed": 3}, marks=pytest.mark.slow),
    ],
)
def test_a_draft_starts_the_step_that_verifies_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: RandomModel, settings: dict[str, Any]
) -> None:
    with edgeinfer.load(target.write(tmp_path / "model.gguf"), draft="mtp", **GPU) as model:
        speculator, model.speculator = model.speculator, None
        expected = model.generate(IDS, **settings).ids
        model.speculator = speculator
        always_draft(model, 3)
        taken, take = list[bool](), StartedVerification.take

        def recorded(self: StartedVerification, ids: Sequence[int], start: int) -> bool:
            taken.append(take(self, ids, start))
            return taken[-1]

        monkeypatch.setattr(StartedVerification, "take", recorded)
        model.engine.rewind(0)
        assert model.generate(IDS, **settings).ids == expected
        steps_of_prompt = 1
        assert taken[steps_of_prompt:].count(True) >= 2
        # A draft that is not verified changes no other completion.
        model.engine.rewind(0)
        model.engine.append(IDS)
        request = DraftRequest(3, SamplingParams(temperature=0.0))
        assert drafter_of(model).propose([*IDS, expected[0]], request).ids
        model.speculator = None
        model.engine.rewind(0)
        assert model.generate(IDS, **settings).ids == expected


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
def test_greedy_drafts_are_verified_without_copies_of_the_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with edgeinfer.load(WITH_HEAD.write(tmp_path / "model.gguf"), draft="mtp", **GPU) as model:
        engine = model.engine
        expected = engine.append_all(IDS).argmax(axis=1).tolist()
        engine.rewind(0)
        assert engine.append_best(IDS) == expected
        engine.rewind(0)
        assert engine.append_best(list(range(3, 20))) is None
        assert engine.ids == []
        copied: list[int] = []
        original = CudaBackend.logits

        def logits(self: CudaBackend, x: Any) -> Any:
            copied.append(len(x))
            return original(self, x)

        monkeypatch.setattr(CudaBackend, "logits", logits)
        always_draft(model, 3)
        drafted = model.generate(IDS, **GREEDY).ids
        assert copied == [1]  # of the prompt
        # A logit that isn't finite: the host gets them all.
        monkeypatch.setattr(CudaBackend, "best_ids", lambda self, ids, start: [-1] * len(ids))
        assert model.generate(IDS, **GREEDY).ids == drafted
        assert max(copied) > 1


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("tree", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 12},
        pytest.param({"top_k": 20, "repeat_penalty": 1.3, "repeat_last_n": 6}, marks=pytest.mark.slow),
    ],
)
def test_sampled_drafts_are_verified_without_copies_of_the_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], tree: bool
) -> None:
    """The tokens are those that the host samples from the logits of the same steps."""
    settings = {"max_tokens": 8, "temperature": 1.5, "seed": 4, **params}
    with edgeinfer.load(
        WITH_HEAD.write(tmp_path / "model.gguf"), draft="mtp", draft_tree_width=2, **GPU
    ) as model:
        (always_tree(model, 2, 5) if tree else always_draft(model, 3))
        with monkeypatch.context() as change:
            change.setattr(draft_verification, "samples_on", lambda *_: False)
            expected = model.generate(IDS, **settings).ids
        copied, sampled = list[int](), list[list[int]]()
        original, sample = CudaBackend.logits, CudaBackend.sample_batch

        def logits(self: CudaBackend, x: Any) -> Any:
            copied.append(len(x))
            return original(self, x)

        def sample_batch(self: CudaBackend, x: Any, *arguments: Any) -> list[int]:
            sampled.append(sample(self, x, *arguments))
            return sampled[-1]

        monkeypatch.setattr(CudaBackend, "logits", logits)
        monkeypatch.setattr(CudaBackend, "sample_batch", sample_batch)
        completion = model.generate(IDS, **settings)
        assert completion.ids == expected
        assert completion.speed.accepted_share is not None
        assert copied == [1]  # of the prompt
        assert len(sampled) > 1
        monkeypatch.setattr(CudaBackend, "sample_batch", lambda self, x, *_: [-1] * len(x))
        assert model.generate(IDS, **settings).ids == expected
        assert max(copied) > 1


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
def test_the_benchmark_of_planted_heads_runs_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains are verified by the steps that the device has started for the tokens of the real head."""
    taken, take = list[bool](), StartedVerification.take

    def recorded(self: StartedVerification, ids: Sequence[int], start: int) -> bool:
        taken.append(take(self, ids, start))
        return taken[-1]

    monkeypatch.setattr(StartedVerification, "take", recorded)
    suite = DraftSuite("cuda", 2, rounds=1, tokens=20)
    rows = list(planted_head(suite, WITH_HEAD.write(tmp_path / "model.gguf")))
    drafts = [f"{name}, {kind}" for name in AGREEMENTS for kind in ("chains", "trees")]
    assert [row[3] for row in rows] == ["baseline", *drafts]
    assert any(taken)


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("options", [{"kv": "q8_0"}, {"parallel": 2}])
def test_other_caches_and_several_requests_change_no_completion(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    model_file = replace(ZOO["qwen35-draft-head"], formats=("Q8_0",)) if "parallel" in options else WITH_HEAD
    path, settings = model_file.write(tmp_path / "model.gguf"), {**GPU, **options}
    short: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0}
    with edgeinfer.load(path, draft=None, **settings) as plain:
        expected = [plain.generate(ids, **short).ids for ids in (IDS, IDS[:3])]
    with edgeinfer.load(path, draft="mtp", **settings) as model:
        assert isinstance(drafter_of(model), DraftHead)
        always_draft(model, 2)
        assert [each.ids for each in model.generate([IDS, IDS[:3]], **short)] == expected
        assert [model.generate(ids, **short).ids for ids in (IDS, IDS[:3])] == expected
