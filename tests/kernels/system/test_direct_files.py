"""Files are read past the page cache where the disk can, with the bytes of the file in any case."""

import os
from pathlib import Path

import numpy as np
import pytest

from edgeinfer_kernels.pages import allocate
from edgeinfer_kernels.system import direct_files
from edgeinfer_kernels.system.direct_files import open_direct, read_at, read_function
from edgeinfer_offload.machine.disk_speed import disk_speed
from edgeinfer_offload.machine.hardware import Disk
from tests.kernels.system.marks import NEEDS_PREAD

pytestmark = NEEDS_PREAD
SECTOR = 512


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "data"
    file.write_bytes(np.random.default_rng(1).bytes(3 << 20))
    return file


@pytest.mark.parametrize("flag", [True, False])
def test_sectors_of_a_file_are_read(path: Path, flag: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not flag:
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    file = open_direct(path, SECTOR)
    target = allocate(4 * SECTOR).data.cast("B")[: 4 * SECTOR]
    assert read_at(file, target, 3 * SECTOR) == 4 * SECTOR
    assert target.tobytes() == path.read_bytes()[3 * SECTOR : 7 * SECTOR]
    os.close(file)


def test_a_disk_with_other_sectors_is_read_through_the_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, target: memoryview, offset: int) -> int:
        raise OSError("Invalid argument")

    monkeypatch.setattr(direct_files, "read_at", refuse)
    file = open_direct(path, SECTOR)
    target = bytearray(100)
    assert os.preadv(file, [target], 7) == 100
    assert bytes(target) == path.read_bytes()[7:107]
    os.close(file)


def test_the_c_function_has_an_address() -> None:
    assert read_function().address


def test_a_disk_is_measured_and_that_of_a_small_file_is_assumed(path: Path, tmp_path: Path) -> None:
    speed = disk_speed(path, 0.02)
    assert 1e5 < speed.bytes_per_second < 1e12
    assert 0 <= speed.read_seconds < 1
    assert speed.seconds(10, 0) == pytest.approx(10 * speed.read_seconds)
    small = tmp_path / "small"
    small.write_bytes(bytes(1000))
    assert disk_speed(small) == Disk()
