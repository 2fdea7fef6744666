"""How many bytes have to be read to bypass the caches."""

import os
from pathlib import Path

import pytest

from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.runtime import bandwidth
from edgeinfer_kernels.system.processor import linux_cache_bytes


def write_cache(folder: Path, cpu: int, index: int, level: int, size: str, shared: str) -> None:
    cache = folder / f"cpu{cpu}" / "cache" / f"index{index}"
    cache.mkdir(parents=True)
    for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", shared)):
        (cache / name).write_text(text + "\n")


@pytest.fixture
def two_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four processors, two of them on a socket; the process may use the first three."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    monkeypatch.setattr(bandwidth, "last_level_cache_bytes", linux_cache_bytes)
    for cpu, shared in enumerate(["0-1", "0-1", "2-3", "2-3"]):
        write_cache(tmp_path, cpu, 0, 1, "48K", str(cpu))
        write_cache(tmp_path, cpu, 3, 3, "300M" if cpu < 2 else "266240K", shared)
    return tmp_path


def test_the_last_caches_of_all_sockets_in_use_count_once(two_sockets: Path) -> None:
    assert linux_cache_bytes(two_sockets) == (300 << 20) + (260 << 20)
    assert bandwidth.uncached_bytes(two_sockets) == 4 * (560 << 20)


def test_no_more_bytes_are_read_than_allowed(two_sockets: Path) -> None:
    assert bandwidth.uncached_bytes(two_sockets, 1 << 30) == 1 << 30
    assert bandwidth.uncached_bytes(two_sockets, 1 << 20) == 256 << 20


def test_without_cache_sizes_a_quarter_of_a_gibibyte_is_read(two_sockets: Path) -> None:
    assert linux_cache_bytes(two_sockets / "cpu0") == 0
    assert bandwidth.uncached_bytes(two_sockets / "cpu0") == 256 << 20


def test_an_invalid_cache_size_is_ignored(two_sockets: Path) -> None:
    (two_sockets / "cpu2" / "cache" / "index3" / "size").write_text("many\n")
    assert linux_cache_bytes(two_sockets) == 300 << 20


def test_thread_counts_alternate(kernels: Kernels) -> None:
    result = bandwidth.usual_bandwidths(kernels, [1, 2], 64 << 20, 0.05)
    assert list(result) == [1, 2]
    assert all(1e8 < rate < 1e13 for rate in result.values())
