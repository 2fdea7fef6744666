"""Free memory is limited by every cgroup above the process."""

from pathlib import Path

import psutil

from edgeinfer_offload.machine.host_memory import host_memory

MIB = 1 << 20


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_without_cgroups_the_limit_is_the_machine_memory(tmp_path: Path) -> None:
    memory = host_memory(tmp_path)
    assert memory.total_bytes == psutil.virtual_memory().total
    assert 0 < memory.free_bytes <= memory.total_bytes
    assert memory.limit_bytes is None


def test_a_version_2_limit_bounds_it_less_use_plus_reclaimable_cache(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/box/inner\n")
    box = tmp_path / "sys/fs/cgroup/box"
    write(box / "memory.max", f"{64 * MIB}\n")
    write(box / "memory.current", f"{60 * MIB}\n")
    write(box / "memory.stat", f"anon 5\ninactive_file {3 * MIB}\n")
    write(box / "inner/memory.max", "max\n")
    memory = host_memory(tmp_path)
    assert (memory.limit_bytes, memory.free_bytes) == (64 * MIB, 7 * MIB)


def test_a_version_1_limit_bounds_it(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "7:cpu,cpuacct:/box\n4:memory:/box\n")
    write(tmp_path / "sys/fs/cgroup/memory/box/memory.limit_in_bytes", str(32 * MIB))
    write(tmp_path / "sys/fs/cgroup/memory/box/memory.usage_in_bytes", str(40 * MIB))
    memory = host_memory(tmp_path)
    assert (memory.limit_bytes, memory.free_bytes) == (32 * MIB, 0)


def test_a_limit_above_the_machine_memory_is_ignored(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    write(tmp_path / "sys/fs/cgroup/memory.max", str(1 << 62))
    assert host_memory(tmp_path).limit_bytes is None
