"""Several drafts of a head and their verification without Python in between: prepares the data of the kernel
in `native/draft/draft_cycles.py`.
"""

from collections.abc import Collection, Sequence
from ctypes import addressof, c_float, c_int64

from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.draft.draft_loop import DraftLoop, draft_step_args
from edgeinfer_kernels.cpu.layout.packed_matrix import Arena
from edgeinfer_kernels.cpu.runtime.abi import MAX_DRAFT_CYCLES, MAX_DRAFT_TOKENS
from edgeinfer_kernels.cpu.runtime.block_args import BestTokensArgs, HeadArgs
from edgeinfer_kernels.cpu.runtime.embedding_args import (
    DraftCyclesArgs,
    DraftInputArgs,
    VerifyingArgs,
)
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs
from edgeinfer_kernels.cpu.runtime.schedule import Run, StepSchedules
from edgeinfer_kernels.cpu.runtime.thread_pool import ThreadPool
from edgeinfer_kernels.draft_loop import CyclesRequest, DraftCycle, DraftRequest
from edgeinfer_kernels.system.clock import NativeClock

TIMES = 1 + 2 * MAX_DRAFT_CYCLES
"""Of a run: its begin, and the ends of each draft and of each step."""
Lengths, Tokens = c_int64 * MAX_DRAFT_CYCLES, c_int64 * (MAX_DRAFT_CYCLES * MAX_DRAFT_TOKENS)
Probs = c_float * (MAX_DRAFT_CYCLES * MAX_DRAFT_TOKENS)


class VerifyingRun:
    """The step of a target as a part of a run, at the address `block`. `run`: the schedule from the embedding
    to the best tokens; `ids`: the address of the tokens that its embedding reads.
    """

    def __init__(
        self,
        arena: Arena,
        schedules: StepSchedules,
        run: Run,
        ids: int,
        head: tuple[StepArgs, HeadArgs],
        best: BestTokensArgs,
    ) -> None:
        _, schedule, steps = run
        head_step, head_args = head
        self.block = arena.fill(
            VerifyingArgs,
            schedule=schedule,
            steps=steps,
            step_args=arena.keep_args(draft_step_args(schedules)),
            step_arg_count=len(schedules.step_args),
            head_step=addressof(head_step),
            ids=ids,
            best=best.ids,
            x=schedules.x,
            x_stride=schedules.stride,
            norm=head_args.norm,
        )


class DraftCycles:
    """The runs of a head: `loop` is its draft loop, `input_args` those of the block that reads the target's
    states, `stride` the bytes between two of its rows.
    """

    def __init__(self, kernels: Kernels, loop: DraftLoop, input_args: DraftInputArgs, stride: int) -> None:
        self._loop, self._clock = loop, NativeClock()
        self._function = kernels.address("draft_cycles")
        # Lists are copied from arrays of ctypes in half the time of numpy's.
        self._draft_lengths, self._step_lengths = Lengths(), Lengths()
        self._drafted, self._probs, self._found = Tokens(), Probs(), Tokens()
        self._clock_time, self._times = (c_int64 * 2)(), (c_int64 * TIMES)()
        self._end_ids: Collection[int] | None = None
        self._end_array = (c_int64 * 0)()
        self._args = DraftCyclesArgs(
            draft=loop.block,
            input=addressof(input_args),
            given=loop.given,
            head_stride=stride,
            clock_function=self._clock.function,
            clock_id=self._clock.argument,
            clock_time=addressof(self._clock_time),
            clock_multiple=self._clock.multiple,
            times=addressof(self._times),
            draft_lengths=addressof(self._draft_lengths),
            step_lengths=addressof(self._step_lengths),
            drafted=addressof(self._drafted),
            probs=addressof(self._probs),
            found=addressof(self._found),
        )
        self._block = addressof(self._args)

    def run(
        self,
        pool: ThreadPool,
        target: VerifyingRun,
        ids: Sequence[int],
        start: int,
        request: DraftRequest,
        run: CyclesRequest,
        states: int,
    ) -> list[DraftCycle]:
        """As `Backend.draft_cycles`; the target's step is prepared, `states` is the address of its states."""
        args, longest = self._args, len(request.min_probs)
        if not 0 < run.max_cycles <= MAX_DRAFT_CYCLES or run.limit < longest:
            raise ValueError(
                f"{run.max_cycles} cycles with {longest} of {run.limit} tokens; wanted 1 to "
                f"{MAX_DRAFT_CYCLES}, with {longest} tokens at least"
            )
        rows = min(run.max_cycles * (1 + longest), run.limit + 1)
        if len(run.states) < rows:
            raise ValueError(f"saw space for {len(run.states)} states, wanted {rows}")
        self._loop.begin(ids, start, request, len(ids) + run.max_cycles * (1 + longest))
        if run.end_ids is not self._end_ids:
            self._set_end_ids(run.end_ids)
        args.target, args.states, args.start = target.block, states, run.start
        args.states_stride = run.states.array.strides[0]
        args.given_count, args.head_start = len(ids), start
        args.longest, args.limit = longest, run.limit
        args.max_cycles, args.is_running = run.max_cycles, 1
        args.cycles = args.drafted_count = args.found_count = 0
        pool.run(self._function, self._block, 0)
        return self._cycles(args.cycles)

    def _set_end_ids(self, end_ids: Collection[int]) -> None:
        self._end_ids = end_ids
        self._end_array = (c_int64 * len(end_ids))(*end_ids)
        self._args.end_ids, self._args.end_count = addressof(self._end_array), len(end_ids)

    def _cycles(self, count: int) -> list[DraftCycle]:
        """What the first cycles have found."""
        args, tick, times = self._args, self._clock.tick, self._times[: 1 + 2 * count]
        drafted, probs = self._drafted[: args.drafted_count], self._probs[: args.drafted_count]
        found, cycles, first, start = self._found[: args.found_count], [], 0, 0
        lengths = zip(self._draft_lengths[:count], self._step_lengths[:count], strict=True)
        for at, (length, produced) in enumerate(lengths):
            last, end = first + length, start + produced
            begin, drafted_at, verified_at = times[2 * at : 2 * at + 3]
            seconds = (drafted_at - begin) * tick, (verified_at - drafted_at) * tick
            cycles.append(DraftCycle(drafted[first:last], probs[first:last], found[start:end], *seconds))
            first, start = last, end
        return cycles
