"""Times workloads: repeated as in llama-bench, or interleaved between engines."""

import time
from collections.abc import Callable, Sequence

from edgeinfer.benchmarking.bench_targets import BenchTarget, wait_until_idle
from edgeinfer.benchmarking.timings import Timings
from edgeinfer.benchmarking.workloads import Workload, needed_context, random_ids
from edgeinfer_offload.machine.energy import NO_METER, EnergyMeter

PIECE_TOKENS = 8
SEED = 1

Report = Callable[[int, int], None]
"""Called with (pieces done, total pieces)."""


def repeat(
    target: BenchTarget,
    workload: Workload,
    repetitions: int = 5,
    warm_up: bool = True,
    seed: int = SEED,
    report: Report | None = None,
    meter: EnergyMeter = NO_METER,
) -> Timings:
    """Repeat the whole workload, each time from its depth, and read the energy that it takes."""
    ids = random_ids(workload.context, target.vocabulary_size, seed)
    fresh = ids[workload.depth :][: workload.tokens]
    _fill(target, ids, workload.depth)
    if warm_up:
        _perform(target, workload, fresh if workload.kind != "generate" else fresh[:1])
    seconds = []
    used_joules = meter.since_now()
    for done in range(repetitions):
        target.rewind(workload.depth)
        begin = time.perf_counter()
        _perform(target, workload, fresh)
        seconds.append(time.perf_counter() - begin)
        if report:
            report(done + 1, repetitions)
    joules = used_joules()
    target.rewind(0)
    return Timings(tuple(seconds), workload.tokens, joules)


def interleave(
    targets: Sequence[BenchTarget],
    workloads: Sequence[Workload],
    rounds: int = 10,
    piece: int = PIECE_TOKENS,
    seed: int = SEED,
    report: Report | None = None,
) -> list[list[Timings]]:
    """Interleave engines, A B A B …: in each round, each engine runs a short piece of each workload, alone
    and from the same state. Timings (workloads, targets).

    All workloads have one depth. A piece of a generation is `piece` tokens, each timed separately; a piece of
    a verification is the number of forwards for half as many tokens. One untimed piece comes first, because
    it wakes the threads and fills the caches that the other engine has evicted. A piece of a prompt is the
    whole prompt, once. Between pieces the process is idle until the previous engine's threads sleep. The
    first round is a warm-up and isn't counted.
    """
    (depth,) = {workload.depth for workload in workloads}
    ids = random_ids(needed_context(workloads), targets[0].vocabulary_size, seed)
    for target in targets:
        _fill(target, ids, depth)
    seconds: list[list[list[float]]] = [[[] for _ in targets] for _ in workloads]
    for done in range(rounds + 1):
        for workload, of_workload in zip(workloads, seconds, strict=True):
            for target, seconds_of_target in zip(targets, of_workload, strict=True):
                wait_until_idle()
                timed = _piece(target, workload, ids[depth:], piece)
                if done:
                    seconds_of_target += timed
        if report:
            report(done, rounds)
    for target in targets:
        target.rewind(0)
    return [
        [
            Timings(tuple(seconds_of_target), 1 if workload.kind == "generate" else workload.tokens)
            for seconds_of_target in of_workload
        ]
        for workload, of_workload in zip(workloads, seconds, strict=True)
    ]


def _fill(target: BenchTarget, ids: Sequence[int], depth: int) -> None:
    target.rewind(0)
    if depth:
        target.read(ids[:depth])


def _perform(target: BenchTarget, workload: Workload, ids: Sequence[int]) -> None:
    if workload.kind == "prompt":
        target.read(ids)
    elif workload.kind == "verify":
        target.read_all(ids)
    else:
        for token in ids:
            target.read([token])


def _piece(target: BenchTarget, workload: Workload, ids: Sequence[int], piece: int) -> list[float]:
    """The seconds of the timed part, from the workload's depth on."""
    target.rewind(workload.depth)
    if workload.kind == "prompt":
        return [_seconds(target, workload, ids[: workload.tokens])]
    if workload.kind == "verify":
        return _verify_piece(target, workload, ids[: workload.tokens], max(1, piece // 2))
    target.read(ids[:1])
    return [_seconds(target, workload, [token]) for token in ids[1 : 1 + min(piece, workload.tokens)]]


def _verify_piece(target: BenchTarget, workload: Workload, ids: Sequence[int], passes: int) -> list[float]:
    seconds = []
    for _ in range(passes + 1):
        target.rewind(workload.depth)
        seconds.append(_seconds(target, workload, ids))
    return seconds[1:]


def _seconds(target: BenchTarget, workload: Workload, ids: Sequence[int]) -> float:
    begin = time.perf_counter()
    _perform(target, workload, ids)
    return time.perf_counter() - begin
