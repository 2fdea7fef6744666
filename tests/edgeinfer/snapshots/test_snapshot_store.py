"""Snapshots in a folder: the longest prefix is found; damage and full disks only cost time."""

import hashlib
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.snapshots.snapshot_file import (
    DIGEST_BYTES,
    PART_SUFFIX,
    Array,
    DamagedSnapshotError,
    Snapshot,
    is_whole,
    read_snapshot,
    write_snapshot,
)
from edgeinfer.snapshots.store import SnapshotStore, delete_snapshots, file_fingerprint


def snapshot(count: int, first: int = 0, nbytes: int = 1000) -> Snapshot:
    arrays: list[Array] = [
        np.arange(nbytes // 4, dtype=np.float16),
        np.zeros((2, 0, 3), np.int8),
        np.full(nbytes // 2, count, np.int8),
    ]
    return Snapshot(list(range(first, first + count)), arrays)


def same(result: tuple[Snapshot, int] | None, other: Snapshot) -> bool:
    """The result equals another snapshot."""
    assert result is not None
    one, length = result
    return (
        length == len(other.ids)
        and one.ids == other.ids
        and all(map(np.array_equal, one.arrays, other.arrays))
    )


def files(folder: Path) -> int:
    return len(list(folder.iterdir()))


def test_a_snapshot_is_found_for_a_longer_prompt(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "new", "a" * 32)
    assert store.longest([0, 1, 2]) is None
    assert store.keep(snapshot(5))
    assert same(store.longest(list(range(9))), snapshot(5))
    assert same(store.longest(list(range(5))), snapshot(5))
    assert store.longest([7, 1, 2, 3]) is None
    assert store.longest(list(range(9)), more_than=5) is None


def test_a_diverging_prompt_reuses_the_shared_prefix(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, "a" * 32)
    store.keep(snapshot(8))
    result = store.longest([0, 1, 2, 3, 9, 5])
    assert result is not None
    assert result[1] == 4
    assert store.longest([0, 1, 2, 3, 9, 5], more_than=4) is None


def test_a_longer_snapshot_replaces_its_prefixes_only(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, "a" * 32)
    for each in (snapshot(4), snapshot(6, first=50), snapshot(8)):
        store.keep(each)
    assert files(tmp_path) == 2
    assert same(store.longest(list(range(20))), snapshot(8))
    assert same(store.longest(list(range(50, 70))), snapshot(6, first=50))


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    SnapshotStore(tmp_path, "a" * 32).keep(snapshot(5))
    assert SnapshotStore(tmp_path, "b" * 32).longest(list(range(9))) is None


def test_the_least_recently_used_snapshot_is_deleted_first(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, "a" * 32, limit_bytes=3500)
    for position, first in enumerate((100, 200, 300)):
        store.keep(snapshot(5, first))
        for path in tmp_path.iterdir():
            if path.stat().st_mtime > 1e9:
                os.utime(path, (1000 + position, 1000 + position))
    assert store.longest(list(range(100, 110))) is not None
    store.keep(snapshot(5, 400))
    found = [first for first in (100, 200, 300, 400) if store.longest(list(range(first, first + 9)))]
    assert found == [100, 300, 400]
    assert not store.keep(snapshot(5, 500, nbytes=9000))


@pytest.mark.parametrize("damage", [b"", b"{}\n", b'{"version": 9, "ids": [], "arrays": []}\n', None])
def test_a_damaged_snapshot_is_deleted(tmp_path: Path, damage: bytes | None) -> None:
    store = SnapshotStore(tmp_path, "a" * 32)
    store.keep(snapshot(5))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    with pytest.raises(DamagedSnapshotError):
        read_snapshot(path)
    assert store.longest(list(range(9))) is None
    assert store.last_error is not None
    assert files(tmp_path) == 0


def test_a_full_disk_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, _: Snapshot) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("edgeinfer.snapshots.store.write_snapshot", full)
    store = SnapshotStore(tmp_path, "a" * 32)
    assert not store.keep(snapshot(5))
    assert store.last_error == f"{tmp_path}: No space left on device"


def test_a_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numpy.ascontiguousarray", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_snapshot(tmp_path / "x.kv", snapshot(5))
    assert files(tmp_path) == 0


def test_the_file_digest_covers_sampled_bytes_and_metadata(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("position", ["head", "arrays", "digest"])
def test_any_flipped_bit_is_detected(tmp_path: Path, position: str) -> None:
    store = SnapshotStore(tmp_path, "a" * 32)
    store.keep(snapshot(5))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    assert is_whole(path)
    first = {"head": 0, "arrays": whole.index(b"\n") + 1, "digest": len(whole) - DIGEST_BYTES}[position]
    count = {"head": whole.index(b"\n") + 1, "arrays": 1000, "digest": DIGEST_BYTES}[position]
    for at in range(first, first + count, 1 + count // 100):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        path.chmod(0o600)
        assert store.longest(list(range(9))) is None
        if not path.exists():
            path.write_bytes(whole)
            path.chmod(0o600)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows deletes no mapped file")
def test_the_next_best_snapshot_is_used_if_the_best_is_damaged(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, "a" * 32)
    store.keep(snapshot(6))
    store.keep(Snapshot([0, 1, 2, 3, 9, 9, 9, 9], snapshot(8).arrays))
    damaged = next(path for path in tmp_path.iterdir() if "-6-" in path.name)
    content = bytearray(damaged.read_bytes())
    content[-40] ^= 1
    damaged.write_bytes(content)
    result = store.longest([0, 1, 2, 3, 4, 5, 7])
    assert result is not None
    assert (len(result[0].ids), result[1]) == (8, 4)
    assert store.last_error == f"{damaged}: its digest is wrong"
    assert not damaged.exists()


@pytest.mark.parametrize(
    "head",
    [
        b"[" * 100_000,
        b'{"version": 2, "ids": [1e400], "arrays": []}',
        b'{"version": 2, "ids": [1], "arrays": [["|O", [1]]]}',
        b'{"version": 2, "ids": [1], "arrays": [["<f2", [4611686018427387904, 4]]]}',
        b'{"version": 2, "ids": [1], "arrays": [["<f2", [-1, -1]]]}',
        b'{"version": 2, "ids": [1], "arrays": [[5, [1]]]}',
        b'{"version": 2, "ids": {}, "arrays": 5}',
        b"[2]",
        b"\xff\xfe",
    ],
)
def test_a_hostile_header_is_refused(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "x.kv"
    content = head + b"\n"
    path.write_bytes(content + hashlib.sha256(content).digest())
    with pytest.raises(DamagedSnapshotError):
        read_snapshot(path)


@pytest.mark.skipif(sys.platform == "win32", reason="modes are those of POSIX")
def test_snapshots_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "snapshots"
    before = os.umask(0)
    try:
        SnapshotStore(folder, "a" * 32).keep(snapshot(5))
    finally:
        os.umask(before)
    (path,) = folder.iterdir()
    modes = [each.stat().st_mode & 0o777 for each in (path, folder, folder.parent)]
    assert modes == [0o600, 0o700, 0o700]


def test_a_snapshot_is_deleted_with_its_chat(tmp_path: Path) -> None:
    for model, owner, first in (("a", "1f", 0), ("b", "1f", 0), ("a", "2f", 50), ("a", None, 90)):
        SnapshotStore(tmp_path, model * 32).keep(snapshot(5, first), owner)
    delete_snapshots("1f", tmp_path)
    store = SnapshotStore(tmp_path, "a" * 32)
    assert [first for first in (0, 50, 90) if store.longest(list(range(first, first + 9)))] == [50, 90]
    assert files(tmp_path) == 2


def test_unfinished_files_of_killed_programs_are_removed(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, "a" * 32)
    ours = tmp_path / f"x.{os.getpid()}{PART_SUFFIX}"
    for path in (tmp_path / f"x.{2**22 + 1}{PART_SUFFIX}", ours):
        path.write_bytes(b"begun")
    store.keep(snapshot(5))
    assert {path.suffix for path in tmp_path.iterdir()} == {PART_SUFFIX, ".kv"}
    assert ours.exists()
    assert files(tmp_path) == 2


@pytest.mark.skipif(sys.platform == "win32", reason="modes are those of POSIX")
def test_world_readable_files_of_earlier_releases_are_removed(tmp_path: Path) -> None:
    old = tmp_path / f"{'b' * 32}-5-{'0' * 16}.kv"
    old.write_bytes(b"a text")
    old.chmod(0o644)
    SnapshotStore(tmp_path, "a" * 32).keep(snapshot(5))
    assert not old.exists()
