"""Activity profiles: their contents, their location, and the error for an invalid file."""

import contextlib
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer_offload.runtime.activity_profile import (
    ActivityProfile,
    ProfileError,
    adjacent_profile_path,
    find_profile,
    model_hash,
    save_profile,
)


def a_profile(path: Path) -> ActivityProfile:
    counts = np.array([[3, 1, 0], [2, 2, 0]], np.uint32)
    return ActivityProfile(
        model_hash(path),
        (4, 2),
        "not exactly zero",
        {"neurons.10": counts, "neurons.2": counts[:, ::-1].copy(), "experts.2": counts[:, :2].copy()},
        {"predictor.2.bias": np.arange(3, dtype=np.float32)},
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "m.gguf"
    path.parent.mkdir()
    path.write_bytes(np.random.default_rng(0).bytes(3 << 20))
    return path


def test_a_profile_is_found_next_to_its_model(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert find_profile(model, data) is None
    stored = a_profile(model)
    assert save_profile(stored, model, data) == adjacent_profile_path(model)
    result = find_profile(model, data)
    assert result is not None
    assert (result.model_hash, result.tokens, result.rule) == (stored.model_hash, (4, 2), "not exactly zero")
    assert list(result.layers("neurons")) == [2, 10]
    assert list(result.layers("experts")) == [2]
    for name, counts in stored.counts.items():
        assert np.array_equal(result.counts[name], counts)
    assert np.array_equal(result.arrays["predictor.2.bias"], [0, 1, 2])
    assert result.active_share("neurons.10") == pytest.approx(8 / (6 * 3))


def test_an_unwritable_model_folder_falls_back_to_the_data_folder(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    adjacent_profile_path(model).mkdir()  # nothing can be written there, even by root
    path = save_profile(a_profile(model), model, data)
    assert path.parent == data / "profiles"
    adjacent_profile_path(model).rmdir()
    assert find_profile(model, data) is not None
    assert save_profile(a_profile(model), model, data, in_data_folder=True) == path
    assert not adjacent_profile_path(model).exists()
    assert os.listdir(path.parent) == [path.name]


def test_a_profile_of_another_model_gives_a_one_line_error(model: Path, tmp_path: Path) -> None:
    save_profile(replace(a_profile(model), model_hash="0" * 64), model, tmp_path)
    expected = model_hash(model)[:12]
    line = (
        f"profile of another model (hash 000000000000, wanted {expected}); "
        "create it again with edgeinfer profile"
    )
    with pytest.raises(ProfileError, match=re.escape(line)):
        find_profile(model, tmp_path)


def test_damaged_profiles_give_a_one_line_error(model: Path, tmp_path: Path) -> None:
    path = save_profile(a_profile(model), model, tmp_path)
    whole = path.read_bytes()
    random = np.random.default_rng(1)
    for length in (0, 1, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ProfileError, match=r"not a valid activity profile \(.*\); create it again"):
            ActivityProfile.load(path)
    for _ in range(200):
        mutated = bytearray(whole)
        for index in random.integers(0, len(whole), 4):
            mutated[index] = random.integers(0, 256)
        path.write_bytes(mutated)
        with contextlib.suppress(ProfileError):
            ActivityProfile.load(path)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("neurons.x", np.zeros((2, 3), np.uint32)),
        ("neurons.0", np.zeros((3, 3), np.uint32)),
        ("neurons.0", np.zeros((2, 3), np.float32)),
        ("neurons.0", np.full((2, 3), 5, np.uint32)),
        ("experts.0", np.zeros((2, 0), np.uint32)),
    ],
)
def test_invalid_counts_are_refused(
    model: Path, tmp_path: Path, name: str, counts: "np.ndarray[tuple[int, ...], np.dtype[np.uint32]]"
) -> None:
    path = tmp_path / "p.npz"
    replace(a_profile(model), counts={name: counts}).save(path)
    with pytest.raises(ProfileError, match="not a valid activity profile"):
        ActivityProfile.load(path)


def test_an_older_version_is_named(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.npz"
    with monkeypatch.context() as patch:
        patch.setattr("edgeinfer_offload.runtime.activity_profile.VERSION", 0)
        a_profile(model).save(path)
    with pytest.raises(ProfileError, match="an activity profile of version 0, wanted 1"):
        ActivityProfile.load(path)


def test_the_hash_covers_the_size_the_header_and_samples_of_the_rest(model: Path) -> None:
    first = model_hash(model)
    assert first == model_hash(model)
    whole = model.read_bytes()
    for changed in (whole + b"\0", b"x" + whole[1:], whole[:-1] + bytes([whole[-1] ^ 1])):
        model.write_bytes(changed)
        assert model_hash(model) != first
