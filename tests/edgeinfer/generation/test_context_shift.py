"""Context shift: a text longer than the context continues without tokens of its middle, and reports it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.engine.kv_cache import KVCache
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import SettingError
from edgeinfer.generation.context_shift import ContextShift
from edgeinfer_kernels.capabilities import Capabilities
from edgeinfer_kernels.cpu.backend import CpuBackend
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.reference import backend as reference
from edgeinfer_kernels.reference.blocks import attention as reference_attention
from edgeinfer_kernels.reference.blocks.attention import attention_weights
from tests.edgeinfer.conftest import ZooFile
from tests.edgeinfer.fake_engine import FakeEngine, model_on, seeded_logits
from tests.model_zoo import ZOO

PROMPT = list(range(3, 23))
CONTEXT = 64


class ShiftingEngine(FakeEngine):
    """An engine that evicts tokens of the middle; its logits are those of the tokens in its cache."""

    capabilities = Capabilities(can_evict=True, has_attention_scores=True)

    def __init__(self) -> None:
        super().__init__(seeded_logits, CONTEXT)
        self._cache = KVCache(CONTEXT)
        self._cache.ids = self.ids
        self.indices: list[list[int]] = []
        self.scored_ids: set[int] = set()
        """Ids with attention scores."""

    @property
    def text(self) -> list[int]:
        return self._cache.text

    @property
    def first_evicted(self) -> int | None:
        return self._cache.first_evicted

    def cached_of(self, length: int) -> int:
        return self._cache.cached_of(length)

    def evict(self, indices: Sequence[int]) -> None:
        self._cache.evict(indices)
        self.indices.append(list(indices))

    def attention_scores(self, count: int) -> npt.NDArray[np.float64]:
        return np.array([float(token in self.scored_ids) for token in self.ids])

    def rewind(self, length: int) -> None:
        self._cache.rewind(length)
        super().rewind(length)


@pytest.fixture
def engine() -> ShiftingEngine:
    return ShiftingEngine()


@pytest.fixture
def model(engine: ShiftingEngine) -> Model:
    return model_on(engine)


@pytest.fixture
def one_layer(tmp_path: Path) -> Iterator[Model]:
    """Keys and values of a single layer depend on their token alone, not on earlier ones."""
    path = replace(ZOO["llama"], layers=1).write(tmp_path / "model.gguf")
    with edgeinfer.load(path, device="cpu", draft=None, context=96, kv="f32") as loaded:
        yield loaded


def test_a_shifted_context_keeps_the_first_and_last_tokens(model: Model, engine: ShiftingEngine) -> None:
    completion = model.generate(PROMPT, max_tokens=100, temperature=0.0, context_overflow="shift")
    assert (len(completion.ids), completion.finish_reason) == (100, "length")
    assert engine.indices == [list(range(4, 20))] * 4
    assert (completion.context_shifts, completion.evicted_tokens) == (4, 64)
    whole = [*PROMPT, *completion.ids]
    assert engine.ids == [*whole[:4], *whole[68:-1]]


def test_every_token_follows_the_shifted_context(model: Model) -> None:
    completion = model.generate(PROMPT, max_tokens=120, temperature=0.0, context_overflow="shift")
    whole, rule = [*PROMPT, *completion.ids], ContextShift(4, CONTEXT)
    for end in range(len(PROMPT), len(whole)):
        rest = rule.remaining_ids(whole[:end], rule.left_out(end))
        assert len(rest) <= CONTEXT
        assert whole[end] == int(np.argmax(seeded_logits(rest)))


def test_without_context_shift_a_completion_ends_with_the_context(
    model: Model, engine: ShiftingEngine
) -> None:
    completion = model.generate(PROMPT, temperature=0.0)
    assert (completion.finish_reason, len(completion.ids)) == ("context", CONTEXT - len(PROMPT))
    assert (completion.context_shifts, completion.evicted_tokens, engine.indices) == (0, 0, [])


def test_the_next_message_reuses_the_shifted_cache(model: Model, engine: ShiftingEngine) -> None:
    first = model.generate(PROMPT, max_tokens=60, temperature=0.0, context_overflow="shift")
    engine.read.clear()
    following = [*PROMPT, *first.ids, 9, 8, 7, 6, 5, 4, 3, 9, 8, 7, 6, 5, 4, 3]
    second = model.generate(following, max_tokens=1, temperature=0.0, context_overflow="shift")
    # The last token of the first completion was not evaluated, and the longer text shifts once more.
    assert engine.read == [15]
    assert engine.indices == [list(range(4, 20))] * 2
    assert second.evicted_tokens == 32
    rule = ContextShift(4, CONTEXT)
    assert second.ids == [int(np.argmax(seeded_logits(rule.remaining_ids(following, 32))))]


def test_an_unshifted_prompt_is_prefilled_again_after_the_gap(model: Model, engine: ShiftingEngine) -> None:
    model.generate(PROMPT, max_tokens=60, temperature=0.0, context_overflow="shift")
    same_ids = [*engine.ids]
    completion = model.generate(same_ids[:40], max_tokens=1, temperature=0.0)
    assert completion.speed.cached_tokens == 4


def test_a_shifted_context_is_not_saved_as_snapshot(
    model: Model, engine: ShiftingEngine, tmp_path: Path
) -> None:
    from edgeinfer.snapshots.engine_snapshots import EngineSnapshots
    from edgeinfer.snapshots.store import SnapshotStore

    snapshots = EngineSnapshots(engine, SnapshotStore(tmp_path, "a" * 32))
    engine.append(list(range(3, 67)))
    assert snapshots.keep()
    model.generate(PROMPT, max_tokens=95, temperature=0.0, context_overflow="shift")
    assert engine.first_evicted == 4
    assert not snapshots.keep()


def test_a_shifted_chat_keeps_its_system_message_and_all_messages(engine: ShiftingEngine) -> None:
    template = (
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}A{% endif %}"
    )
    chat = model_on(engine, template).chat("be.", temperature=0.0, max_tokens=20, context_overflow="shift")
    completions = [chat.say(f"turn {number}") for number in range(6)]
    assert len(chat.messages) == 12
    assert [completion.dropped_messages for completion in completions] == [0] * 6
    assert completions[-1].evicted_tokens >= completions[2].evicted_tokens > 0
    assert chat.context_used <= CONTEXT
    (cached_ids,) = {indices[0] for indices in engine.indices}
    first, other = completions[0].prompt_ids, completions[-1].prompt_ids
    assert first[:cached_ids] == other[:cached_ids] == engine.ids[:cached_ids]
    assert first[cached_ids] != other[cached_ids + completions[-1].evicted_tokens]


def test_shifted_keys_give_the_logits_of_the_shortened_text(one_layer: Model) -> None:
    engine = one_layer.engine
    assert isinstance(engine, NativeEngine)
    ids = np.random.default_rng(3).integers(3, 90, 96).tolist()
    engine.append(ids)
    engine.evict(range(5, 37))
    assert (engine.first_evicted, len(engine.ids)) == (5, 64)
    shifted = engine.append([7])
    engine.rewind(0)
    assert engine.first_evicted is None
    engine.append([*ids[:5], *ids[37:]])
    np.testing.assert_allclose(shifted, engine.append([7]), rtol=2e-3, atol=2e-4)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("policy", ["shift", "h2o"])
@pytest.mark.parametrize("draft", ["lookup", "self"])
def test_drafts_do_not_change_a_shifted_completion(zoo_file: ZooFile, draft: str, policy: str) -> None:
    settings: Any = {"max_tokens": 220, "temperature": 0.0, "context_overflow": policy}
    result = []
    for drafter in (None, draft):
        with edgeinfer.load(zoo_file("llama"), device="cpu", draft=drafter, context=96, kv="f32") as loaded:
            result.append(loaded.generate(PROMPT, **settings))
    assert result[0].ids == result[1].ids
    assert result[0].context_shifts == result[1].context_shifts > 3


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"context_overflow": "fold"}, "context_overflow: saw 'fold', wanted one of 'stop', 'shift', 'h2o'"),
        (
            {"context_overflow": "shift", "beams": 2},
            "context_overflow: beam search supports 'stop' only",
        ),
    ],
)
def test_unsupported_requests_are_refused(model: Model, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError, match=text):
        model.generate(PROMPT, **settings)


def test_h2o_keeps_heavy_hitters_with_the_first_and_last_tokens(model: Model, engine: ShiftingEngine) -> None:
    engine.scored_ids = {7, 11, 13}
    completion = model.generate(PROMPT, max_tokens=50, temperature=0.0, context_overflow="h2o")
    (indices,) = engine.indices
    assert len(indices) == 16
    whole = [*PROMPT, *completion.ids]
    assert not engine.scored_ids & {whole[at] for at in indices[:10]}
    assert indices[0] >= 4
    assert indices[-1] < CONTEXT - CONTEXT // 4
    assert engine.ids == [token for at, token in enumerate(whole[:-1]) if at not in indices]
    assert engine.text == whole[:-1]
    assert (completion.context_shifts, completion.evicted_tokens) == (1, 16)


def test_the_next_message_reuses_the_heavy_hitters(model: Model, engine: ShiftingEngine) -> None:
    engine.scored_ids = {7, 11, 13}
    first = model.generate(PROMPT, max_tokens=50, temperature=0.0, context_overflow="h2o")
    held, following = [*engine.ids], [*PROMPT, *first.ids, 9, 8, 7]
    engine.read.clear()
    second = model.generate(following, max_tokens=1, temperature=0.0, context_overflow="h2o")
    assert engine.read == [4]
    assert engine.ids == [*held, *following[-4:]]
    assert second.evicted_tokens == 16
    changed = [*PROMPT[:9], 90, *PROMPT[10:]]
    third = model.generate(changed, max_tokens=1, temperature=0.0, context_overflow="h2o")
    assert engine.text == engine.ids == changed
    assert third.evicted_tokens == 0


def test_a_prompt_too_long_for_the_context_loses_its_middle(model: Model, engine: ShiftingEngine) -> None:
    model.generate(PROMPT, max_tokens=50, temperature=0.0, context_overflow="h2o")
    text = [*PROMPT, *(np.arange(200) % 80 + 3).tolist()]
    model.generate(text, max_tokens=1, temperature=0.0, context_overflow="h2o")
    rule = ContextShift(4, CONTEXT)
    assert engine.ids == rule.remaining_ids(text, rule.left_out(len(text)))


def test_an_evicted_cache_matches_the_full_text() -> None:
    cache = KVCache(100)
    cache.append(range(20))
    cache.evict([3, 4, 8])
    cache.evict([3, 9, 10])  # positions 5, 12 and 13 of the text
    cache.append([20, 21])
    assert cache.ids == [0, 1, 2, 6, 7, 9, 10, 11, 14, 15, 16, 17, 18, 19, 20, 21]
    assert cache.text == list(range(22))
    assert [cache.cached_of(length) for length in (3, 4, 6, 7, 9, 22)] == [3, 3, 3, 4, 5, 16]
    assert cache.first_evicted == 3
    cache.rewind(8)
    assert cache.text == list(range(12))
    cache.rewind(4)
    assert cache.text == [0, 1, 2, 3, 4, 5, 6]
    cache.rewind(3)
    assert (cache.text, cache.evicted) == ([0, 1, 2], [])


@pytest.mark.parametrize(("name", "kv", "near"), [("llama", "f32", 1e-3), ("gpt-oss", "q4_0", 0.2)])
def test_attention_scores_are_those_of_the_last_tokens(
    zoo_file: ZooFile, monkeypatch: pytest.MonkeyPatch, name: str, kv: Any, near: float
) -> None:
    seen: list[npt.NDArray[np.floating]] = []

    def recorded(*arguments: Any, **options: Any) -> Iterator[npt.NDArray[np.floating]]:
        for weights in attention_weights(*arguments, **options):
            seen.append(weights)
            yield weights

    monkeypatch.setattr(reference_attention, "attention_weights", recorded)
    ids = np.random.default_rng(3).integers(3, 60, 50).tolist()
    with edgeinfer.load(zoo_file(name), device="cpu", draft=None, context=96, kv=kv) as loaded:
        engine = loaded.engine
        assert isinstance(engine, NativeEngine)
        assert isinstance(engine.backend, CpuBackend)
        engine.append(ids)
        before = engine.append([5])
        engine.rewind(50)
        scores = engine.attention_scores(8)
        state = DecoderState.allocate(engine.specification, 96, "f32")
        exact = reference.ReferenceBackend(engine.specification, engine.backend.weights, state)
        for first, some in ((0, ids[:42]), (42, ids[42:])):
            seen.clear()
            exact.forward(exact.embed(some), first)
        np.testing.assert_allclose(engine.append([5]), before, rtol=1e-2, atol=1e-2)
    expected = sum(weights.sum(axis=0) for weights in seen)
    assert scores.shape == (50,)
    assert np.linalg.norm(scores - expected) < near * np.linalg.norm(expected)
    assert (scores[-1] < scores[:-8]).sum() > 10  # only the last position attends to the last


def test_h2o_needs_an_engine_with_attention_scores(engine: ShiftingEngine) -> None:
    engine.capabilities = Capabilities(can_evict=True)
    with pytest.raises(SettingError, match="h2o needs attention scores of the CPU for all layers"):
        model_on(engine).generate(PROMPT, context_overflow="h2o")


def test_an_engine_without_context_shift_refuses_before_prefill() -> None:
    other = FakeEngine(seeded_logits)
    with pytest.raises(SettingError, match=r"saw .shift., .* evicted from the cache of this engine"):
        model_on(other).generate(PROMPT, context_overflow="shift")
    assert other.read == []


def test_a_context_too_small_for_the_kept_tokens_is_refused(engine: ShiftingEngine) -> None:
    engine.context = 40
    with pytest.raises(
        SettingError, match=r"4 first tokens stay .* holds 40; wanted a context of at least 64"
    ):
        model_on(engine).generate(PROMPT, context_overflow="shift")
    engine.context = 64
    chat = model_on(engine).chat("x" * 50, context_overflow="shift")
    with pytest.raises(SettingError, match="wanted a context of at least 1"):
        chat.say("hi")
