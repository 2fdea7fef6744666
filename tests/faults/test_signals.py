"""Signals during loading, quantizing and pulling: the next start is clean, no file is left."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.edgeinfer.download.hostile_server import HostileServer
from tests.faults.outcomes import ROOT
from tests.random_models import RandomModel

if sys.platform == "win32":
    pytest.skip("signals are those of POSIX", allow_module_level=True)
pytestmark = pytest.mark.slow
POINTS = {signal.SIGINT: (0, 3), signal.SIGTERM: (1, 6), signal.SIGKILL: (0, 1, 3, 6)}
"""When each signal comes. SIGINT raises an exception at its points; SIGTERM and SIGKILL end the process."""
MODEL = RandomModel("llama", width=256, layers=3, heads=4, head_dim=64, feed_forward=1024)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    MODEL.write(tmp_path / "model.gguf")
    (tmp_path / "pulled").mkdir()
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[HostileServer]:
    with HostileServer((folder / "model.gguf").read_bytes()) as running:
        (folder / "url").write_text(running.url())
        yield running


def run(kind: str, folder: Path, number: int, point: int) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "tests.faults.signal_points", kind, str(folder), str(number), str(point)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["load", "quantize", "pull"])
def test_the_start_after_a_signal_is_clean(folder: Path, server: HostileServer, kind: str) -> None:
    valid = run(kind, folder, signal.SIGTERM, -1)
    assert valid.returncode == 0, valid.stderr
    after = names(folder)
    counts: Counter[int] = Counter()
    for number, points in POINTS.items():
        for point in points:
            for path in ("small.gguf", "pulled/model.gguf"):
                (folder / path).unlink(missing_ok=True)
            ended = run(kind, folder, number, point)
            counts[ended.returncode] += 1
            assert ended.returncode in (0, 130, -number), ended.stderr
            again = run(kind, folder, signal.SIGTERM, -1)
            assert (again.returncode, again.stdout) == (0, valid.stdout), again.stderr
            assert names(folder) == after
    print(kind, dict(counts))
    assert counts.total() == sum(map(len, POINTS.values()))
    assert counts[-signal.SIGKILL] > 0
