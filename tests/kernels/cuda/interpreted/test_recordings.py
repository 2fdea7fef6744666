"""Replayed launches have the results of interpreted ones, whatever is in memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.cuda.conftest import HAS_GPU
from tests.kernels.cuda.interpreted import recordings
from tests.kernels.cuda.interpreted.programs import Launcher
from tests.kernels.cuda.interpreted.recordings import Recordings
from tests.kernels.cuda.interpreted.test_programs import branches, last, shape_kernel

pytestmark = pytest.mark.skipif(HAS_GPU, reason="Triton interprets kernels only where there is no GPU")
PROGRAMS, SIZE = 5, 8


@triton.jit
def sums_kernel(x, counts, out, ROUNDS: tl.constexpr, SIZE: tl.constexpr):
    """Each program adds up as many rows as memory says; then it doubles the sum if that is negative."""
    program, columns = tl.program_id(0), tl.arange(0, SIZE)
    total = tl.zeros((SIZE,), tl.float32)
    for row in range(tl.load(counts + program)):
        tl.store(out + program * SIZE + columns, total)
        total += tl.load(x + row * SIZE + columns, mask=columns != program, other=0.5)
    if tl.sum(total, axis=0) < 0:
        total *= 2
    for _ in range(ROUNDS):
        total = tl.sort(total + columns)
    tl.store(out + program * SIZE + columns, total)


@triton.jit
def assumed_kernel(x, out, SIZE: tl.constexpr):
    """Conditions of whole blocks are not recorded."""
    at = tl.arange(0, SIZE)
    values = tl.load(x + at)
    tl.store(out + at, values + 1)
    tl.assume(values >= 0)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were interpreted."""
    names: list[str] = []
    original = Launcher.interpret

    def interpret(self: Launcher, executor: Any, *args: Any) -> None:
        names.append(executor.fn.__name__)
        original(self, executor, *args)

    monkeypatch.setattr(Launcher, "interpret", interpret)
    return names


def unrecorded(launch: Callable[[], torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The result where nothing is replayed."""
    with monkeypatch.context() as changes:
        changes.setattr(Recordings, "replay", lambda *_: False)
        changes.setattr(Recordings, "is_due", lambda *_: False)
        return launch()


def sums(seed: int, counts: tuple[int, ...], rounds: int = 1) -> torch.Tensor:
    x = torch.randn((9, SIZE), generator=torch.Generator().manual_seed(seed))
    out = torch.full((PROGRAMS, SIZE), torch.nan)
    sums_kernel[(PROGRAMS,)](x, torch.tensor(counts, dtype=torch.int32), out, ROUNDS=rounds, SIZE=SIZE)
    return out


def shapes(seed: int) -> torch.Tensor:
    x = torch.randn((PROGRAMS, SIZE, SIZE), generator=torch.Generator().manual_seed(seed))
    out = torch.full((PROGRAMS, SIZE, SIZE), 7.0)
    shape_kernel[(PROGRAMS,)](x, out, ROWS=SIZE, COLUMNS=SIZE)
    return out


@pytest.mark.parametrize("launch", [branches, last])
def test_the_third_launch_is_replayed(
    launch: Callable[[], torch.Tensor], interpreted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = unrecorded(launch, monkeypatch)
    results = [launch() for _ in range(4)]
    before = len(interpreted)
    results.append(launch())
    assert len(interpreted) == before
    for result in results:
        assert torch.equal(result, expected)


def test_other_numbers_at_other_addresses_are_computed(
    interpreted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [shapes(seed) for seed in range(4)]
    before = len(interpreted)
    for seed in range(4, 8):
        kept.append(shapes(seed))
    assert len(interpreted) == before
    for seed, result in enumerate(kept):
        assert torch.equal(result, unrecorded(lambda seed=seed: shapes(seed), monkeypatch))


def test_branches_and_loops_follow_what_is_in_memory(
    interpreted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [
        (seed, counts)
        for seed in range(4)
        for counts in ((2, 2, 2, 2, 2), (2, 0, 9, 0, 2), (1, 1, 1, 1, 1), (2, 0, 9, 1, 2))
    ]
    results = [sums(*case) for _ in range(3) for case in cases]
    before = len(interpreted)
    results += [sums(*case) for case in cases]
    assert len(interpreted) == before
    for case, result in zip(cases * 4, results, strict=True):
        expected = unrecorded(lambda case=case: sums(*case), monkeypatch)
        assert torch.equal(result, expected)


def test_what_can_not_be_recorded_is_interpreted(interpreted: list[str]) -> None:
    for start in (0, 5, 7, 9):
        x, out = torch.arange(start, start + SIZE), torch.zeros(SIZE, dtype=torch.int64)
        assumed_kernel[(1,)](x, out, SIZE=SIZE)
        assert torch.equal(out, x + 1)
    # The second launch is interpreted again after its recording has failed.
    assert interpreted == ["assumed_kernel"] * 5


@pytest.mark.slow
def test_the_oldest_recordings_are_removed(interpreted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MAX_BYTES", 1)
    for rounds in (2, 2, 2, 3, 3, 2):
        assert torch.isfinite(sums(0, (1, 1, 1, 1, 1), rounds)).all()
    # Two of each are interpreted, the third is replayed; that of the first has then been removed.
    assert interpreted == ["sums_kernel"] * 5
