"""A model file that is truncated while it is mapped: a clear error, or a last line before SIGBUS."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import edgeinfer
from edgeinfer.errors import ModelFileError
from edgeinfer_kernels.cpu.bus_error import MESSAGE
from edgeinfer_quant_formats import FormatError
from tests.kernels.system.marks import NEEDS_CUT_MAPPINGS
from tests.random_models import RandomModel

LARGE = RandomModel("llama", width=256, layers=2, heads=4, head_dim=64, feed_forward=512)

READS_PAST_END = """
import mmap, os, sys
from edgeinfer_kernels.cpu.bus_error import explain_bus_errors
explain_bus_errors()
explain_bus_errors()
with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    file.truncate(0)
    mapped[8192]
"""


@NEEDS_CUT_MAPPINGS
@pytest.mark.parametrize("repack", [True, False])
def test_a_truncated_file_ends_generation_with_an_error(tmp_path: Path, repack: bool) -> None:
    path = LARGE.write(tmp_path / "model.gguf")
    size = path.stat().st_size
    with edgeinfer.load(path, device="cpu", threads=1, draft=None, repack=repack) as model:
        model.generate([1, 5, 6], max_tokens=2)
        os.truncate(path, 8192)
        with pytest.raises(ModelFileError) as caught:
            model.generate([1, 5, 6, 7], max_tokens=2)
        assert str(caught.value) == (
            f"{path}: the file has 8192 bytes, wanted the {size} that it had when it was opened: another "
            "program has cut it; restore it and load the model again"
        )


@NEEDS_CUT_MAPPINGS
def test_a_file_truncated_during_loading_is_an_error(tmp_path: Path) -> None:
    path = LARGE.write(tmp_path / "model.gguf")

    def cut(done: int, total: int) -> None:
        # Not to zero bytes: another thread may still read the pages that it has requested.
        os.truncate(path, path.stat().st_size - 1)

    with pytest.raises(FormatError, match="another program has cut it"):
        edgeinfer.load(path, device="cpu", threads=1, draft=None, progress=cut)


def test_a_file_that_grows_is_no_error(tmp_path: Path) -> None:
    path = LARGE.write(tmp_path / "model.gguf")
    with edgeinfer.load(path, device="cpu", threads=1, draft=None) as model:
        with path.open("ab") as file:
            file.write(b"more")
        assert model.generate([1, 5, 6], max_tokens=2).ids


@pytest.mark.skipif(sys.platform != "linux", reason="what a read behind the end raises differs elsewhere")
def test_a_read_past_the_end_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(16384))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", READS_PAST_END, str(path)], env=environment, capture_output=True, timeout=60
    )
    assert ended.returncode == -7
    assert ended.stderr == MESSAGE
