"""Programs that the interpreter runs at once have the results of programs that run one after another."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.cuda.conftest import HAS_GPU

pytestmark = pytest.mark.skipif(HAS_GPU, reason="Triton interprets kernels only where there is no GPU")
PROGRAMS, SIZE = 5, 8


@triton.jit
def branch_kernel(out, SIZE: tl.constexpr):
    """Each third program adds to what it has stored; the others run a loop of their index."""
    program = tl.program_id(0)
    at = program * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.load(out + at) + 1.0)
    if program % 3 == 0:
        tl.store(out + at, tl.load(out + at) * 10.0)
    else:
        for _ in range(program):
            tl.store(out + at, tl.load(out + at) + 100.0)


@triton.jit
def last_kernel(arrived, sums, total, COUNT: tl.constexpr):
    """The program that arrives last adds what all have stored."""
    program = tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)
    tl.store(sums + program, program.to(tl.float32) + 1.0)
    before = tl.atomic_add(arrived, 1, sem="acq_rel")
    if before == COUNT - 1:
        each = tl.arange(0, 16)
        tl.store(total, tl.sum(tl.load(sums + each, mask=each < COUNT, other=0.0), axis=0))


@triton.jit
def waiting_kernel(arrived, count, order, POLLS: tl.constexpr):
    """Each program waits until its number has arrived; then how many programs have run before it."""
    program, one = tl.program_id(0), tl.arange(0, 1)
    at, is_wanted = arrived + program + one, tl.full((1,), 1, tl.int1)
    seen = tl.load(at, mask=is_wanted, other=0, volatile=True)
    polls = 0
    while (tl.sum(seen, axis=0) == 0) & (polls < POLLS):
        seen = tl.load(at, mask=is_wanted, other=0, volatile=True)
        polls += 1
    before = tl.load(count)
    tl.store(order + program, before)
    tl.store(count, before + 1)


@triton.jit
def larger(first, second):
    return tl.where(first > second, first, second)


@triton.jit
def shape_kernel(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Operations that move, combine and reduce axes, of other numbers in each program."""
    program = tl.program_id(0)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = rows[:, None] * COLUMNS + columns[None, :]
    block = tl.load(x + program * ROWS * COLUMNS + at)
    scaled = block * (program + 1).to(tl.float32)
    result = tl.dot(scaled, tl.trans(block), input_precision="ieee")
    result += tl.max(scaled, axis=1)[:, None] - tl.reduce(block, 0, larger)[None, :]
    even, odd = tl.split(tl.reshape(scaled, (ROWS, COLUMNS // 2, 2)))
    result += tl.sum(even, axis=1)[None, :] + tl.cumsum(tl.sum(odd, axis=1), axis=0)[:, None]
    result += tl.sum(tl.join(even, odd)) + tl.sum(block * block.to(tl.float16).to(tl.float32))
    best = tl.argmax(block, axis=1)
    result += tl.gather(scaled, best[:, None], 1) + tl.where(best[:, None] > 2, program.to(tl.float32), 0.5)
    tl.store(
        out + program * ROWS * ROWS + rows[:, None] * ROWS + rows[None, :], result, rows[:, None] != program
    )


Numbers = npt.NDArray[np.float32]
Launch = Callable[[], torch.Tensor]


def branches() -> torch.Tensor:
    out = torch.arange(PROGRAMS * SIZE, dtype=torch.float32)
    branch_kernel[(PROGRAMS,)](out, SIZE=SIZE)
    return out


def last() -> torch.Tensor:
    arrived, sums, total = torch.zeros(1, dtype=torch.int32), torch.zeros(16), torch.full((1,), torch.nan)
    last_kernel[(3, 4)](arrived, sums, total, COUNT=12)
    return torch.cat([arrived.float(), sums, total])


def blocks() -> Numbers:
    return np.random.default_rng(3).normal(size=(PROGRAMS, SIZE, SIZE)).astype(np.float32)


def shapes() -> torch.Tensor:
    x = torch.from_numpy(blocks())
    out = torch.full((PROGRAMS, SIZE, SIZE), 7.0)
    shape_kernel[(PROGRAMS,)](x, out, ROWS=SIZE, COLUMNS=SIZE)
    return out


@pytest.mark.parametrize("launch", [branches, last, shapes])
def test_programs_at_once_equal_programs_in_order(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.kernels.cuda.interpreted import programs

    together = launch()
    monkeypatch.setattr(programs, "MAX_PROGRAMS", 1)
    torch.testing.assert_close(together, launch(), rtol=0, atol=0, equal_nan=False)


def test_programs_take_their_branches() -> None:
    start = np.arange(PROGRAMS * SIZE, dtype=np.float32).reshape(PROGRAMS, SIZE) + 1
    factors, terms = np.array([10, 1, 1, 10, 1]), np.array([0, 100, 200, 0, 400])
    expected = start * factors[:, None] + terms[:, None]
    np.testing.assert_array_equal(branches().reshape(PROGRAMS, SIZE), expected)


def test_each_program_has_the_result_of_its_block() -> None:
    for program, (result, block) in enumerate(zip(shapes().numpy(), blocks(), strict=True)):
        scaled = block * (program + 1)
        expected = scaled @ block.T + scaled.max(1)[:, None] - block.max(0)
        expected += scaled[:, ::2].sum(1) + scaled[:, 1::2].sum(1).cumsum()[:, None]
        expected += scaled.sum() + (block * block.astype(np.float16)).sum()
        best = block.argmax(1)[:, None]
        expected += np.take_along_axis(scaled, best, 1) + np.where(best > 2, program, 0.5)
        expected[program] = 7
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def test_one_program_arrives_last() -> None:
    results: Any = last()
    assert results[0] == 12
    assert results[-1] == sum(range(1, 13))


def test_programs_that_wait_for_another_process_run_in_their_order() -> None:
    arrived, count = torch.tensor([0, 1, 0, 0, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    order = torch.full((PROGRAMS,), -1, dtype=torch.int32)
    waiting_kernel[(PROGRAMS,)](arrived, count, order, POLLS=3)
    assert order.tolist() == list(range(PROGRAMS))
