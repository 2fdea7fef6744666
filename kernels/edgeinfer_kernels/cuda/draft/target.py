"""What a draft head on a GPU uses of its target there: it reads the embedding, the output and the kept
states, and may start the step that verifies a draft.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from edgeinfer_kernels.cuda.weights.device_block import DeviceCache
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.decoder import BlockIndex
from edgeinfer_kernels.sizes.cuda_matrices import padded_rows

if TYPE_CHECKING:  # it captures drafts too
    from edgeinfer_kernels.cuda.cache.sequences import DeviceSequence
    from edgeinfer_kernels.cuda.decode.captured_steps import CapturedSteps


class StartedVerification:
    """The step of a target that verifies a draft, started before the host has the draft. While it runs, the
    host reads the tokens, and then takes the step instead of running one. A step of other tokens, or a change
    of the cache, discards it.
    """

    def __init__(
        self, steps: "CapturedSteps", sequence: "DeviceSequence", discard_ahead: Callable[[], None]
    ) -> None:
        """`discard_ahead`: discards all steps that were started ahead, this one too."""
        self._steps, self._sequence, self._discard_ahead = steps, sequence, discard_ahead
        self._first, self._count, self._start = 0, 0, 0
        """The token before the draft, the number of draft tokens, and the position of the first."""
        self._started: tuple[tuple[int, ...], int] | None = None
        self._set = 0

    @property
    def can_start(self) -> bool:
        """Whether the step needs no other devices, and no tokens on the host."""
        step = self._steps.step
        return step.exchange is None and step.collective is None and not self._steps.per_layer.is_given

    @property
    def words(self) -> Tensor:
        """The words of the step; draft token i is that at 1 + i."""
        return self._steps.step.workspace.state

    @property
    def vocabulary(self) -> int:
        """How many token ids the target has."""
        return self._steps.step.model.vocabulary

    def prepare(self, token_id: int, start: int, count: int) -> None:
        """Set the step of the token at `start` and of `count` draft tokens after it, which the device will
        add to the words.
        """
        self._discard_ahead()
        self._steps.sequence = self._sequence
        self._steps.set_state([token_id, *[0] * count], start)
        self._first, self._start, self._count = token_id, start, count
        self._set = self._steps.times_set

    def start(self) -> None:
        """Start the step, after the launches that add its tokens."""
        self._steps.run(1 + self._count)

    def expect(self, ids: Sequence[int]) -> None:
        """The step has these draft tokens."""
        self._started = (self._first, *ids), self._start

    def take(self, ids: Sequence[int], start: int) -> bool:
        """Whether the last step that was started has these tokens; a step is taken once."""
        started, self._started = self._started, None
        is_last = self._steps.times_set == self._set and self._steps.sequence is self._sequence
        return is_last and started == (tuple(ids), start)

    def discard(self) -> None:
        """The cache is about to change."""
        self._started = None


@dataclass(frozen=True)
class HeadTarget:
    """The target of a draft head on the same device.

    `embedding`, `output`: its matrices; None: the head has its own. `states`: those that the target keeps,
    the rows of a `StateRing`. `verification`: of its drafts; None: it can't start before the host has them.
    `caches`: of the target, for attention blocks of the head that read these.
    """

    embedding: DeviceMatrix | None
    output: DeviceMatrix | None
    states: Tensor
    verification: StartedVerification | None = None
    caches: Mapping[BlockIndex, DeviceCache] = field(default_factory=dict)


def first_rows(matrix: DeviceMatrix, rows: int) -> DeviceMatrix:
    """The first rows of a matrix in the same memory; rows in the middle begin a group of sixteen."""
    shapes = replace(matrix.shapes, rows=rows)
    if rows > matrix.shapes.rows or (rows < matrix.shapes.rows and padded_rows(rows) != rows):
        raise ValueError(f"first rows of a matrix: saw {rows}, wanted a multiple of 16 up to its rows")
    words, scales, super_scales = (
        part[: shape[0]]
        for part, shape in zip(matrix.parts, (shapes.words, shapes.scales, shapes.super_scales), strict=True)
    )
    return DeviceMatrix(shapes, matrix.format, words, scales, super_scales)
