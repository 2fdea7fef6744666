"""Launches of a kernel with the same constants make the same numpy calls: recorded once, then replayed.

A replay has none of the work of Triton's language, and none of the calls that depend on no memory. What a
kernel's Python code reads (a branch, the bound of a loop) is read again: another number continues with the
calls recorded for it, or undoes the launch, which is then interpreted and recorded too.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from tests.kernels.cuda.interpreted.memory import KEPT
from tests.kernels.cuda.interpreted.recorded_arrays import Call, Numbers, Segment, number_of

MAX_BYTES = 256 << 20
"""Of the constants of all recordings; the recording used longest ago is removed first."""
MAX_PATHS = 64
"""Paths of a launch, by the numbers it reads. One with more is interpreted."""
Path = Sequence[tuple[Segment, Any]]


class _Node:
    """A segment, with those that follow by the number that is read at its end; `dead`: for each call, the
    indices of the values that no later one needs.
    """

    def __init__(self, segment: Segment, dead: list[set[int]]) -> None:
        self.calls, self.number, self.values = segment.calls, segment.number, segment.values
        self.keeps = segment.number is not None or segment.is_undone
        self.following: dict[Any, _Node] = {}
        self.steps: list[tuple[Any, tuple[int, ...], int, tuple[int, ...]]] = []
        self.dead = dead
        self.set_dead(dead)

    def set_dead(self, dead: list[set[int]]) -> None:
        """After another path through this node, which may need more values."""
        self.dead = [before & now for before, now in zip(self.dead, dead, strict=True)]
        self.steps = []
        for (function, arguments, at), values in zip(self.calls, self.dead, strict=True):
            kept = KEPT.get(function) if self.keeps else None
            if kept is not None:
                function, arguments = kept, (0, *arguments)
            self.steps.append((function, arguments, at, tuple(values)))

    def is_alike(self, segment: Segment) -> bool:
        """Whether the segment has the same calls."""
        return self.number == segment.number and [_facts(call) for call in self.calls] == [
            _facts(call) for call in segment.calls
        ]


def _facts(call: Call) -> tuple[Any, ...]:
    return getattr(call[0], "func", call[0]), *call[1:]


def dead_values(path: Path) -> list[list[set[int]]]:
    """For each call of each segment, the values that no later call needs."""
    last: dict[int, set[int]] = {}
    """Value -> the dead ones of the last call that uses it."""
    result: list[list[set[int]]] = []
    for segment, _ in path:
        result.append([set() for _ in segment.calls])
        for call, dead in zip(segment.calls, result[-1], strict=True):
            for index in call[1]:
                last[index] = dead
            last[call[2]] = dead
        if segment.number is not None:
            last[segment.number] = set()
    last.pop(0, None)  # What undoes stores is needed until the end.
    for index, dead in last.items():
        dead.add(index)
    return result


class _Recording:
    """All that is known of launches with the same constants."""

    def __init__(self) -> None:
        self.root: _Node | None = None
        self.launches = self.paths = self.nbytes = 0
        self.is_recordable = True

    def add(self, path: Path) -> None:
        """Insert a recorded launch."""
        dead = dead_values(path)
        node, number = self.root, None
        for index, (segment, read) in enumerate(path):
            found = self.root if index == 0 else node.following.get(number)  # type: ignore[union-attr]
            if found is None or not found.is_alike(segment):
                found = _Node(segment, dead[index])
                self.nbytes += sum(each.nbytes for each in segment.values if isinstance(each, np.ndarray))
                if index == 0:
                    self.root = found
                else:
                    assert node is not None
                    node.following[number] = found
            else:
                found.set_dead(dead[index])
            node, number = found, read
        self.paths += 1

    def replay(self, pointers: Sequence[Numbers]) -> bool:
        """Whether a path is known for what the launch reads; if none is, memory is as before."""
        node = self.root
        undo: list[Callable[[], None]] = []
        values: list[Any] = [undo]
        while node is not None:
            values += node.values
            if node is self.root:
                values[1 : 1 + len(pointers)] = pointers
            for function, arguments, at, dead in node.steps:
                values[at] = function(*[values[index] for index in arguments])
                for index in dead:
                    values[index] = None
            if node.number is None:
                return True
            node = node.following.get(number_of(values[node.number]))
        for each in reversed(undo):
            each()
        return False


class Recordings:
    """The recordings of this process."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, _Recording] = OrderedDict()
        self._nbytes = 0

    def replay(self, key: Hashable, pointers: Sequence[Numbers]) -> bool:
        """Whether the launch is done. If not, it is to be interpreted, and recorded if `is_due`."""
        recording = self._known.get(key)
        if recording is None:
            recording = self._known[key] = _Recording()
        self._known.move_to_end(key)
        recording.launches += 1
        return recording.root is not None and recording.replay(pointers)

    def is_due(self, key: Hashable) -> bool:
        """Whether to record the launch: many are made only once."""
        recording = self._known[key]
        return recording.launches > 1 and recording.is_recordable and recording.paths < MAX_PATHS

    def add(self, key: Hashable, path: Path) -> None:
        """Store what `Recorder.finish` returns."""
        recording = self._known[key]
        self._nbytes -= recording.nbytes
        recording.add(path)
        self._nbytes += recording.nbytes
        while self._nbytes > MAX_BYTES and len(self._known) > 1:
            self._nbytes -= self._known.popitem(last=False)[1].nbytes

    def refuse(self, key: Hashable) -> None:
        """Launches with this key are not recorded."""
        self._known[key].is_recordable = False
