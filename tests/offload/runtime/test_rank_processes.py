"""The processes of ranks: results, errors, ranks that end, Ctrl-C, and that none is left."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from edgeinfer_kernels.backend import BackendError
from edgeinfer_offload.runtime.rank_processes import RankError, RankProcesses

MODULE = "tests.offload.runtime.small_rank"
NAMES = ("cuda:0", "cuda:1")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="NCCL has no Windows build")


@pytest.fixture
def ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(MODULE, lambda _: (0, 1), NAMES)
    try:
        yield processes
    finally:
        processes.close()


def are_gone(process_ids: list[int]) -> bool:
    for process_id in process_ids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, 0)
            return False
    return True


def test_results_are_those_of_the_first_rank_or_of_each() -> None:
    progress: list[tuple[int, int]] = []
    ranks = RankProcesses(MODULE, lambda _: (0, 1), NAMES, lambda done, total: progress.append((done, total)))
    process_ids = ranks.process_ids
    assert (ranks.ready, progress, len(process_ids)) == ([0, 1], [(1, 2)], 2)
    assert ranks.call("double", 4) == [8, 9]
    assert ranks.call("count") == [1, None]
    assert ranks.call("length", bytes(1 << 20)) == [1 << 20, None]
    with pytest.raises(RankError, match=r"^no such thing$") as caught:
        ranks.call("fail", [0, 1])
    assert caught.value.kind == "ValueError"
    assert ranks.call("double", 5) == [10, 11]
    ranks.close()
    assert are_gone(process_ids)
    with pytest.raises(BackendError, match="the model has been closed; load the model again"):
        ranks.call("count")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("fail", ([1],), r"^the process of cuda:1 failed \(no such thing\); load the model again$"),
        (
            "die",
            (1, "out of x"),
            r"^the process of cuda:1 ended by signal 6: .*out of x; load the model again$",
        ),
    ],
)
def test_a_rank_that_fails_alone_or_ends_ends_all(
    ranks: RankProcesses, method: str, arguments: tuple[object, ...], message: str
) -> None:
    process_ids = ranks.process_ids
    with pytest.raises(BackendError, match=message):
        ranks.call(method, *arguments)
    assert are_gone(process_ids)
    with pytest.raises(BackendError, match=message):
        ranks.call("count")


def test_a_rank_that_ended_between_two_calls_is_reported(ranks: RankProcesses) -> None:
    process_ids = ranks.process_ids
    os.kill(process_ids[0], signal.SIGKILL)
    with pytest.raises(BackendError, match="the process of cuda:0 ended by signal 9"):
        ranks.call("hang", [1])
    assert are_gone(process_ids)


def test_errors_while_loading_are_raised() -> None:
    with pytest.raises(RankError, match="too large"):
        RankProcesses(MODULE, lambda _: ("too large", "too large"), NAMES)
    with pytest.raises(BackendError, match=r"^the process of cuda:1 ended with status 1: .*No module named"):
        RankProcesses("tests.offload.no_such_module", lambda _: (0, 1), NAMES[1:] * 2)


def test_an_interrupted_call_does_not_confuse_later_ones(ranks: RankProcesses) -> None:
    for _ in range(20):
        timer = threading.Timer(0.002, signal.raise_signal, (signal.SIGINT,))
        with contextlib.suppress(KeyboardInterrupt):
            timer.start()
            for number in range(100_000):
                assert ranks.call("double", number) == [2 * number, 2 * number + 1]
        with contextlib.suppress(KeyboardInterrupt):
            timer.join()
        assert ranks.call("double", 3) == [6, 7]


PROGRAM = f"""
import os, signal
from edgeinfer_offload.runtime.rank_processes import RankProcesses
ranks = RankProcesses({MODULE!r}, lambda store: (0, 1), {NAMES!r})
print(*ranks.process_ids, flush=True)
ranks.call("hang", [0, 1])
"""


@pytest.mark.slow
def test_no_rank_is_left_if_the_program_is_killed() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, env=environment)
    assert program.stdout is not None
    process_ids = [int(word) for word in program.stdout.readline().split()]
    assert len(process_ids) == 2
    ends = [os.pidfd_open(process_id) for process_id in process_ids]
    program.kill()
    program.wait()
    for end in ends:
        assert select.select([end], [], [], 30)[0]  # readable: the process has ended
        os.close(end)
