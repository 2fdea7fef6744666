"""A profile is made of what a model reads: counts only, and the user's stays as it is."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer.loading import activity_counting
from edgeinfer.profiling import activity_counts
from edgeinfer.profiling.activity_counts import MAX_TOKENS, MIN_TOKENS, RULE, ActivityCounts
from edgeinfer.user_folders import user_folder
from edgeinfer_offload.runtime.activity_profile import ActivityProfile, find_profile, model_hash, save_profile
from tests.model_zoo import ZOO

ARCEE = replace(ZOO["arcee"], width=256, feed_forward=512, formats=("Q8_0",), layers=2)
PROMPT = [5 + index % 40 for index in range(48)]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(activity_counting, "MIN_BYTES", 0)
    monkeypatch.setattr(activity_counts, "MIN_TOKENS", 32)
    return ARCEE.write(tmp_path / "m.gguf")


def read(path: Path, prompts: int, **options: bool) -> None:
    with edgeinfer.load(path, device="cpu", draft=None, context=64, **options) as model:  # type: ignore[call-overload]
        for _ in range(prompts):
            model.engine.rewind(0)
            model.engine.append(PROMPT)


def test_prompts_make_a_profile_that_grows(path: Path) -> None:
    read(path, 2)
    profile = find_profile(path, user_folder("data"))
    assert profile is not None
    assert (profile.rule, profile.tokens, sorted(profile.counts)) == (
        RULE,
        (16, 16),
        ["neurons.0", "neurons.1"],
    )
    assert all(0.2 < profile.active_share(name) < 0.8 for name in profile.counts)
    read(path, 4)
    assert sum(find_profile(path, user_folder("data")).tokens) == 96  # type: ignore[union-attr]


@pytest.mark.slow
def test_prompts_count_the_neurons_of_experts(path: Path) -> None:
    model = replace(ZOO["smallthinker"], width=256, expert_length=512, formats=("Q8_0",), layers=2)
    experts = model.write(path.with_name("experts.gguf"))
    read(experts, 2)
    profile = find_profile(experts, user_folder("data"))
    assert profile is not None
    assert sorted(profile.counts) == ["expert_neurons.0", "expert_neurons.1"]
    shares = [profile.share_in_experts(layer, 8, 3) for layer in range(2)]
    assert all(0.2 < share < 0.8 for share in shares if share is not None)
    assert profile.share_in_experts(0, 7, 3) is None


def test_automatic_mode_uses_the_counts(path: Path) -> None:
    read(path, 2)
    with edgeinfer.load(path, device="cpu", draft=None) as model:
        assert any(
            "sparse feed-forward" in line or "the feed-forward is dense" in line for line in model.details
        )


def test_nothing_is_counted_on_request_or_for_little_text_or_other_activations(path: Path) -> None:
    read(path, 2, count_activity=False)
    read(path, 1)
    silu = ZOO["llama"].write(path.with_name("silu.gguf"))
    read(silu, 3)
    assert find_profile(path, user_folder("data")) is None
    assert find_profile(silu, user_folder("data")) is None


def test_a_profile_of_the_user_is_never_changed(path: Path) -> None:
    counts = {"neurons.0": np.ones((2, 512), np.uint32)}
    for in_data_folder in (False, True):
        mine = ActivityProfile(model_hash(path), (64, 64), "not exactly zero", counts)
        saved = save_profile(mine, path, user_folder("data"), in_data_folder)
        before = saved.read_bytes()
        read(path, 2)
        assert saved.read_bytes() == before
        saved.unlink()


@pytest.mark.slow
def test_old_counts_lose_weight(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"x" * 5000)
    counts = ActivityCounts(tmp_path / "m.gguf", {3: 0}, tmp_path)
    for _ in range(2 * MAX_TOKENS // 256):
        counts.observe(3, np.array([[1.0, 0.0]] * 256, np.float32))
        counts.observe(4, np.ones((256, 2), np.float32))
    path = counts.save()
    assert path is not None
    profile = ActivityProfile.load(path)
    assert MIN_TOKENS < sum(profile.tokens) <= MAX_TOKENS
    assert profile.active_share("neurons.3") == pytest.approx(0.5)
