"""Schedules: the blocks of a model as lists that the thread pool executes in one run, and their arguments:
the addresses of hidden states, positions, and RoPE tables, and the rows of logits that a schedule writes.
"""

from collections.abc import Collection, Sequence
from ctypes import addressof, c_char, c_int64
from sys import getrefcount
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import BatchPositions
from edgeinfer_kernels.blocks.common.rope import RopeSpec
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.layout.packed_matrix import Arena, address
from edgeinfer_kernels.cpu.runtime.abi import STEP_TOKENS
from edgeinfer_kernels.cpu.runtime.block_args import BestTokensArgs, HeadArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import MatrixArgs, ScheduleStep, StepArgs, TokenArgs
from edgeinfer_kernels.decoder import DecoderSpec
from edgeinfer_kernels.recurrent_state import RecurrentStep

ROPE_POSITIONS = 256
"""Positions whose cosines and sines are computed together; one by one, they would cost 50 us per token."""
MAX_KEPT = 3
"""Maximum number of retained arrays: the current one, and earlier ones whose last row may still be in use."""
OWN_REFERENCES = 3
"""References in the list, in the loop, and in the call that counts them."""
Run = tuple[int, int, int]
"""Arguments of a thread pool run: a function, its block and its step."""


def quick_address(array: npt.NDArray[Any]) -> int:
    """As `address`, for a writable array. numpy's attribute runs Python code, which takes 20 us between two
    steps if it is not in a cache; the buffer protocol, which needs contiguous bytes, takes a few us.
    """
    return addressof(c_char.from_buffer(array.data)) if array.flags.c_contiguous else address(array)


class RopeTable:
    """Cosines and sines of the last requested positions and some after them; empty without a `rope`."""

    def __init__(self, rope: RopeSpec | None) -> None:
        self._rope = rope
        self._start = self._end = 0
        self.stride = 0 if rope is None else rope.table(0, 1).nbytes
        """Bytes between two positions."""

    def address_of(self, start: int, count: int) -> int:
        """Address of the cosines and sines of `count` positions from `start` on, 0 without RoPE; computed for
        many positions at a time.
        """
        if self._rope is None:
            return 0
        if not self._start <= start <= start + count <= self._end:
            self._table = self._rope.table(start, count + ROPE_POSITIONS)
            self._start, self._end = start, start + len(self._table)
            self._address = address(self._table)
        return self._address + (start - self._start) * self.stride


def fill_step(
    step: StepArgs, x: int, stride: int, tokens: int, start: int, rope: int, token_args: int = 0
) -> None:
    """Fill the arguments for tokens whose rows are at `x`, `stride` bytes apart; `rope` is 0 without RoPE.

    `token_args`: 0, or the address of a `PositionTable`.
    """
    step.x, step.x_stride, step.tokens = x, stride, tokens
    step.start, step.rope, step.token_args = start, rope, token_args


def fill_slots(step: StepArgs, slots: RecurrentStep, before: int = 0) -> None:
    """Fill the slots of recurrent states; `before`: as in `StepArgs`."""
    step.pending, step.source, step.target = slots
    step.before = before


class PositionTable:
    """The arguments of some tokens, at `address`. `recent`: the slots of their pages of recent positions, if
    they have any (`RecentPages.touch_batch`).
    """

    def __init__(self, batch: BatchPositions, recent: npt.NDArray[np.int64] | None = None) -> None:
        is_readable = batch.pages.dtype == np.int64 and batch.pages.strides[1] == batch.pages.itemsize
        # Rows of one sequence may be the same memory, with a stride of 0.
        self._pages = batch.pages if is_readable else np.ascontiguousarray(batch.pages, np.int64)
        self._copies = [np.array([*copies, -1], np.int64) for copies in batch.copies]
        self._tokens = (TokenArgs * len(batch.positions))()
        pages, stride = address(self._pages), self._pages.strides[0]
        for index, (token, position) in enumerate(zip(self._tokens, batch.positions.tolist(), strict=True)):
            token.position, token.pages = position, pages + stride * index
        for token, copies in zip(self._tokens, self._copies, strict=False):
            token.copies = address(copies)
        self._recent = recent
        for token, slots in () if recent is None else zip(self._tokens, recent, strict=True):
            token.recent = address(slots)
        self.address = addressof(self._tokens)


Pages = tuple[int, int] | None
"""As `StatePool.page_table`."""


class StepCall(NamedTuple):
    """A kernel and its structure, the RoPE whose table it reads, and the pages of joined states."""

    function: int
    block: int
    rope: RopeSpec | None
    pages: Pages = None


class StepSchedules:
    """Lists of kernels for `runner`, the kernel `run_schedule`; `layers`: those of each layer.

    `by_token`: functions that need no barrier afterwards in a decode step. `ends_everywhere`: then every
    thread sees x after each layer.
    Kernels with the same RoPE and pages share a call: `step_args` are these calls with their RoPE tables,
    `pages` the pages of each. Hidden states are at `x`, `stride` bytes apart.
    """

    def __init__(
        self,
        arena: Arena,
        runner: int,
        layers: Sequence[Sequence[StepCall]],
        x: int,
        stride: int,
        by_token: Collection[int],
        *,
        ends_everywhere: bool = False,
    ) -> None:
        self._arena, self._runner, self._layers = arena, runner, layers
        self._by_token, self._ends_everywhere = by_token, ends_everywhere
        self.x, self.stride = x, stride
        calls = [(step.rope, step.pages) for layer in layers for step in layer]
        keys = dict.fromkeys(calls or [(None, None)])  # A Markov head has no layers.
        self._table_of = {rope: RopeTable(rope) for rope, _ in keys}
        made = {key: StepArgs() for key in keys}
        self.step_args = [(self._table_of[rope], args) for (rope, _), args in made.items()]
        self.pages = [pages for _, pages in keys]
        self._step_args_of = {key: arena.keep_args(args) for key, args in made.items()}
        self._made = dict[tuple[int, ...], Run]()

    def of_layers(self, layers: Sequence[int]) -> Run:
        """The schedule of some layers; cached."""
        key = tuple(layers)
        if key not in self._made:
            self._made[key] = self._listed(self._steps(layers))
        return self._made[key]

    def whole(
        self, before: Sequence[tuple[int, int]], after: Sequence[tuple[int, int]], head_args: int
    ) -> Run:
        """The schedule of `before` (called like the first layer), all layers, and the head with what follows
        it.
        """
        args = next(iter(self._step_args_of.values()))
        first = [(function, block, args) for function, block in before]
        last = [(function, block, head_args) for function, block in after]
        return self._listed([*first, *self._steps(range(len(self._layers))), *last], len(last))

    def fill_slots(self, slots: RecurrentStep, before: int = 0) -> None:
        """Fill the slots of recurrent states in all calls; `before`: as in `StepArgs`."""
        for _, args in self.step_args:
            fill_slots(args, slots, before)

    def fill(self, tokens: int, start: int, token_args: int = 0, span: int = 0, x: int = 0) -> None:
        """Fill all calls for the next tokens: at positions start…, or as in the `PositionTable` at
        `token_args`.

        `span`: number of positions from `start` on with RoPE tables; `x`: address of the hidden states, if
        not the default.
        """
        at = x or self.x
        for table, args in self.step_args:
            rope = table.address_of(start, max(span, tokens))
            fill_step(args, at, self.stride, tokens, start, rope, token_args)

    def table_of(self, rope: RopeSpec | None) -> RopeTable:
        """The table of a RoPE."""
        return self._table_of[rope]

    def _steps(self, layers: Sequence[int]) -> list[tuple[int, int, int]]:
        """(function, block, call) for each block of these layers."""
        return [
            (step.function, step.block, self._step_args_of[step.rope, step.pages])
            for layer in layers
            for step in self._layers[layer]
        ]

    def _listed(self, steps: Sequence[tuple[int, int, int]], after: int = 0) -> Run:
        """The schedule of these steps, of which the head and others `after` the layers are the last."""
        listed = [(*step, int(step[0] not in self._by_token)) for step in steps]
        if after and steps[:-after] and not self._ends_everywhere:
            listed[-after - 1] = (*steps[-after - 1], 1)  # The head may be called for one of the rows only.
        if listed:  # A run ends with a barrier.
            listed[-1] = (*steps[-1], 0)
        schedule = self._arena.fill_all(ScheduleStep, [ScheduleStep(*step) for step in listed])
        return self._runner, schedule, self._arena.keep(np.array([len(steps)], np.int64))


class UnpackedRows:
    """Returns arrays (rows, columns) float32 like `np.empty`.

    The operating system maps memory of this size for every allocation, page by page on first write. That
    takes about 30 us for the logits of five tokens with a small vocabulary, a thirtieth of a small model's
    forward.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._kept: list[npt.NDArray[np.float32]] = []

    def rows(self, count: int) -> npt.NDArray[np.float32]:
        """An array without other references to it or to any part of it."""
        if not 1 < count <= STEP_TOKENS:
            return np.empty((count, self._columns), np.float32)
        for kept in self._kept:
            if getrefcount(kept) == OWN_REFERENCES and len(kept) >= count:
                return kept[:count]
        made = np.empty((STEP_TOKENS, self._columns), np.float32)
        self._kept = [made, *self._kept][:MAX_KEPT]
        return made[:count]


class BestTokens:
    """The tokens of the largest logits of a step, and the logits, which nothing else reads: what the kernel
    `best_tokens_block` with these `args` writes and reads. `scale`: of the logits.
    """

    def __init__(self, vocabulary: int, scale: float = 1.0) -> None:
        self._logits = np.empty((STEP_TOKENS, padded(vocabulary)), np.float32)
        self._ids = (c_int64 * STEP_TOKENS)()
        self.args = BestTokensArgs(
            logits=address(self._logits),
            logits_stride=self._logits.strides[0],
            vocabulary=vocabulary,
            scale=scale,
            ids=addressof(self._ids),
        )
        self.block = addressof(self.args)
        self.logits = self.args.logits
        """The address of the logits."""

    def first(self, count: int) -> list[int]:
        """The token of each of the first rows; -1: a logit isn't finite."""
        return self._ids[:count]


class HeadOutput:
    """What the head kernel with these `args` writes: logits, before the output's bias, scale and soft cap."""

    def __init__(self, args: HeadArgs, spec: DecoderSpec, bias: npt.NDArray[np.float32] | None) -> None:
        self.args, self._spec, self._bias = args, spec, bias
        self._rows = UnpackedRows(padded(spec.vocabulary_size))
        self.vocabulary = spec.vocabulary_size
        """Rows of the output that are multiplied: those of the first ids."""

    def limit(self, rows: int) -> None:
        """Multiply only the first `rows` of the output from now on."""
        MatrixArgs.from_address(self.args.matrix).rows = self.vocabulary = rows

    def rows(self, count: int) -> npt.NDArray[np.float32]:
        """The array (count, padded vocabulary) that the next call writes."""
        whole = self._rows.rows(count)
        self.args.logits = quick_address(whole)
        return whole

    def logits(self, whole: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The written `rows` (count, vocabulary) with their bias, scaled and soft-capped in place."""
        spec = self._spec
        out = whole[:, : self.vocabulary]
        if self._bias is not None:
            out += self._bias[: self.vocabulary]
        if spec.logit_scale != 1.0:
            out *= np.float32(spec.logit_scale)
        if spec.logit_soft_cap:
            out /= np.float32(spec.logit_soft_cap)
            np.tanh(out, out)
            out *= np.float32(spec.logit_soft_cap)
        return out
