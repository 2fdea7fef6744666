"""Snapshots in a folder: the longest beginning is found, damage and full disks cost nothing but time."""

import os
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.snapshots.fingerprint import file_fingerprint
from edgeinfer.snapshots.snapshot_file import (
    Array,
    DamagedSnapshotError,
    Snapshot,
    read_snapshot,
    write_snapshot,
)
from edgeinfer.snapshots.store import SnapshotStore


def snapshot(count: int, first: int = 0, nbytes: int = 1000) -> Snapshot:
    arrays: list[Array] = [
        np.arange(nbytes // 4, dtype=np.float16),
        np.zeros((2, 0, 3), np.int8),
        np.full(nbytes // 2, count, np.int8),
    ]
    return Snapshot(list(range(first, first + count)), arrays)


def same(found: tuple[Snapshot, int] | None, other: Snapshot) -> bool:
    """All of another snapshot is what was found."""
    assert found is not None
    one, length = found
    return (
        length == len(other.ids)
        and one.ids == other.ids
        and all(map(np.array_equal, one.arrays, other.arrays))
    )


def files(folder: Path) -> int:
    return len(list(folder.iterdir()))


def test_what_is_kept_is_found_for_a_text_that_goes_on(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "new", "a" * 32)
    assert store.longest([0, 1, 2]) is None
    assert store.keep(snapshot(5))
    assert same(store.longest(list(range(9))), snapshot(5))
    assert same(store.longest(list(range(5))), snapshot(5))
    assert store.longest([7, 1, 2, 3]) is None
    assert store.longest(list(range(9)), more_than=5) is None


def test_a_text_that_parts_from_a_snapshot_shares_its_beginning(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, "a" * 32)
    store.keep(snapshot(8))
    found = store.longest([0, 1, 2, 3, 9, 5])
    assert found is not None
    assert found[1] == 4
    assert store.longest([0, 1, 2, 3, 9, 5], more_than=4) is None


def test_a_longer_snapshot_takes_the_place_of_its_beginnings_only(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, "a" * 32)
    for each in (snapshot(4), snapshot(6, first=50), snapshot(8)):
        store.keep(each)
    assert files(tmp_path) == 2
    assert same(store.longest(list(range(20))), snapshot(8))
    assert same(store.longest(list(range(50, 70))), snapshot(6, first=50))


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    SnapshotStore(tmp_path, "a" * 32).keep(snapshot(5))
    assert SnapshotStore(tmp_path, "b" * 32).longest(list(range(9))) is None


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, "a" * 32, limit_bytes=3500)
    for place, first in enumerate((100, 200, 300)):
        store.keep(snapshot(5, first))
        for path in tmp_path.iterdir():
            if path.stat().st_mtime > 1e9:
                os.utime(path, (1000 + place, 1000 + place))
    assert store.longest(list(range(100, 110))) is not None
    store.keep(snapshot(5, 400))
    kept = [first for first in (100, 200, 300, 400) if store.longest(list(range(first, first + 9)))]
    assert kept == [100, 300, 400]
    assert not store.keep(snapshot(5, 500, nbytes=9000))


@pytest.mark.parametrize("damage", [b"", b"{}\n", b'{"version": 9, "ids": [], "arrays": []}\n', None])
def test_a_damaged_snapshot_is_thrown_away(tmp_path: Path, damage: bytes | None) -> None:
    store = SnapshotStore(tmp_path, "a" * 32)
    store.keep(snapshot(5))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    with pytest.raises(DamagedSnapshotError):
        read_snapshot(path)
    assert store.longest(list(range(9))) is None
    assert store.trouble is not None
    assert files(tmp_path) == 0


def test_a_full_disk_costs_nothing_but_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, _: Snapshot) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("edgeinfer.snapshots.store.write_snapshot", full)
    store = SnapshotStore(tmp_path, "a" * 32)
    assert not store.keep(snapshot(5))
    assert store.trouble == f"{tmp_path}: No space left on device"


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numpy.ascontiguousarray", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_snapshot(tmp_path / "x.kv", snapshot(5))
    assert files(tmp_path) == 0


def test_files_differ_by_a_byte_anywhere_sampled_and_by_what_else_matters(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    content = np.random.default_rng(1).bytes(3 << 20)
    one.write_bytes(content)
    other.write_bytes(content[:-1] + b"x")
    assert file_fingerprint(one, "f16") == file_fingerprint(one, "f16")
    assert (
        len({file_fingerprint(one, "f16"), file_fingerprint(one, "q8_0"), file_fingerprint(other, "f16")})
        == 3
    )
    assert len(file_fingerprint(one)) == 32
