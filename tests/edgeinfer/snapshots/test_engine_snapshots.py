"""A snapshot of one model is restored by another: the same completions without prefill."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.snapshots.snapshot_file import Snapshot
from edgeinfer.snapshots.store import SnapshotStore
from tests.edgeinfer.conftest import ZooFile
from tests.edgeinfer.fake_engine import FakeEngine, model_on, seeded_logits

LONG = list(range(3, 103))
GREEDY: Any = {"max_tokens": 8, "temperature": 0.0}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the snapshots."""
    monkeypatch.setattr("edgeinfer.lora.model_lora.snapshots_folder", lambda: tmp_path / "snapshots")
    return tmp_path / "snapshots"


def loaded(path: Path) -> Model:
    return edgeinfer.load(path, device="cpu", draft=None, context=256, snapshots=True)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma3n", "qwen3moe", "deepseek2"])
def test_a_saved_prompt_is_not_prefilled_again(zoo_file: ZooFile, folder: Path, name: str) -> None:
    with loaded(zoo_file(name)) as model:
        first = model.generate(LONG, **GREEDY)
        plain = model.generate([*LONG, *first.ids, 7, 9], **GREEDY)
        assert model.keep_snapshot()
    assert len(list(folder.iterdir())) == 1
    with loaded(zoo_file(name)) as model:
        again = model.generate([*LONG, *first.ids, 7, 9], **GREEDY)
    assert again.ids == plain.ids
    assert again.speed.cached_tokens == len(LONG) + len(first.ids) + 1


def test_a_four_bit_cache_is_saved_with_its_scales(zoo_file: ZooFile, folder: Path) -> None:
    def opened() -> edgeinfer.Model:
        return edgeinfer.load(
            zoo_file("llama"), device="cpu", draft=None, context=256, kv="fp8/q4_0", snapshots=True
        )

    with opened() as model:
        plain = model.generate([*LONG, 7, 9], **GREEDY)
        model.generate(LONG, **GREEDY)
        assert model.keep_snapshot()
    with opened() as model:
        again = model.generate([*LONG, 7, 9], **GREEDY)
    assert (again.ids, again.speed.cached_tokens) == (plain.ids, len(LONG))


def test_a_diverging_prompt_is_prefilled_from_the_divergence(zoo_file: ZooFile, folder: Path) -> None:
    other = [*LONG[:90], *range(150, 170)]
    with loaded(zoo_file("llama")) as model:
        plain = model.generate(other, **GREEDY)
        model.generate(LONG, **GREEDY)
        model.keep_snapshot()
    with loaded(zoo_file("llama")) as model:
        again = model.generate(other, **GREEDY)
        assert (again.ids, again.speed.cached_tokens) == (plain.ids, 90)
        # What is already in the cache isn't loaded.
        assert model.generate(other, **GREEDY).speed.cached_tokens == len(other) - 1


def test_a_short_prompt_is_not_saved(zoo_file: ZooFile, folder: Path) -> None:
    with loaded(zoo_file("llama")) as model:
        model.generate(LONG[:20], **GREEDY)
        assert not model.keep_snapshot()
    assert not folder.exists()


def test_snapshots_are_disabled_by_default(zoo_file: ZooFile, folder: Path) -> None:
    with edgeinfer.load(zoo_file("llama"), device="cpu", draft=None, context=256) as model:
        model.generate(LONG, **GREEDY)
        assert not model.keep_snapshot()
    assert not folder.exists()


def test_another_cache_type_has_another_snapshot_key(zoo_file: ZooFile, folder: Path) -> None:
    with loaded(zoo_file("llama")) as model:
        model.generate(LONG, **GREEDY)
        model.keep_snapshot()
    with edgeinfer.load(
        zoo_file("llama"), device="cpu", draft=None, context=256, kv="f32", snapshots=True
    ) as other:
        assert other.generate(LONG, **GREEDY).speed.cached_tokens == 0


def test_a_snapshot_of_another_cache_is_refused_and_the_prompt_prefilled(
    zoo_file: ZooFile, folder: Path
) -> None:
    with loaded(zoo_file("llama")) as model:
        engine = model.engine
        assert isinstance(engine, NativeEngine)
        engine.append(LONG)
        good = engine.snapshot()
        for arrays in (
            good.arrays[:-1],
            [*good.arrays[:-1], np.zeros((1, 2, 3))],
            [*good.arrays, good.arrays[0]],
        ):
            with pytest.raises(ValueError, match="of another cache"):
                engine.restore(Snapshot(good.ids, arrays), 50)
        with pytest.raises(ValueError, match="300 tokens of a snapshot of 100"):
            engine.restore(good, 300)


def test_a_damaged_snapshot_causes_prefill_only(zoo_file: ZooFile, folder: Path) -> None:
    with loaded(zoo_file("llama")) as model:
        plain = model.generate(LONG, **GREEDY)
        model.keep_snapshot()
    (path,) = folder.iterdir()
    os.truncate(path, 5000)
    with loaded(zoo_file("llama")) as model:
        assert model.generate(LONG, **GREEDY).ids == plain.ids


def test_any_engine_with_state_can_be_saved(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, "f" * 32)
    for cached in (0, 99):
        model = model_on(FakeEngine(seeded_logits, 256))
        model_with_store = Model("fake", model.engine, model.tokenizer, None, snapshots=store)
        assert model_with_store.generate(LONG, max_tokens=4, temperature=0.0).speed.cached_tokens == cached
        assert model_with_store.keep_snapshot()
