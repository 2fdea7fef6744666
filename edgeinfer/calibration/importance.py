"""Measures an importance matrix: the squared inputs of every matrix, summed over a text."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from edgeinfer.calibration.checkpoint import Arrays, Checkpoint, file_key, partial_folder, run_key
from edgeinfer.calibration.reference_model import ReferenceModel, opened, reference_model
from edgeinfer.errors import SettingError
from edgeinfer.registry.registry import find_model
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.reference.step import Array
from edgeinfer_quant_formats import GGUFFile
from edgeinfer_quant_formats.quantizer.importance_file import InputSums, write_importance

TEXT_TOKENS = 8192
LAYER_PREFIX = "blk."
SUMS = "sums"

Report = Callable[[str, int, int], None]
"""Called with the current task, and its done and total amounts."""


class InputRecorder:
    """Sums the squared inputs of the layers' matrices; `seen` is an observer of a `ReferenceBackend`."""

    def __init__(self, file: GGUFFile) -> None:
        self._shapes = {name: info.shape for name, info in file.tensors.items()}
        self._parts: dict[tuple[str, int], int] = {}
        self.sums: dict[str, InputSums] = {}

    def seen(self, matrix: Matrix, expert: int, inputs: Array) -> None:
        shape = self._shapes.get(matrix.name, ())
        if not matrix.name.startswith(LAYER_PREFIX) or matrix.columns != (shape or (0,))[-1]:
            return
        # Parts of one tensor, such as q, k and v, have the same inputs; the first one counts.
        address = matrix.raw.ctypes.data
        if self._parts.setdefault((matrix.name, expert), address) != address:
            return
        if matrix.name not in self.sums:
            matrices = int(np.prod(shape[:-2]))
            self.sums[matrix.name] = InputSums(
                np.zeros((matrices, matrix.columns)), np.zeros(matrices, np.int64)
            )
        found = self.sums[matrix.name]
        found.squares[expert] += np.einsum("tc,tc->c", inputs, inputs, dtype=np.float64)
        found.counts[expert] += len(inputs)

    def stored(self) -> Arrays:
        """The sums as arrays of a checkpoint."""
        squares = {f"squares {name}": found.squares for name, found in self.sums.items()}
        return squares | {f"counts {name}": found.counts for name, found in self.sums.items()}

    def restore(self, arrays: Arrays) -> None:
        """Continue from stored sums."""
        for key, squares in arrays.items():
            kind, _, name = key.partition(" ")
            if kind == "squares":
                self.sums[name] = InputSums(squares, arrays[f"counts {name}"])


def measure_importance(
    model: str | Path | None,
    text: str,
    target: str | Path,
    *,
    tokens: int = TEXT_TOKENS,
    dataset: str = "",
    report: Report | None = None,
) -> int:
    """Write the importance matrix of `model` on `text` to the GGUF file `target`; return its tensor count.

    `tokens`: maximum tokens of the text, in windows of 512 that each begin with an empty cache. `dataset`:
    the text's name in the file. An interrupted run leaves `target`.partial, with which the same call resumes.

    Raises:
        SettingError: a text without a whole window, an encoder.
        FormatError: a file that can't be read.
        OSError: the file can't be written.
    """
    path, target = find_model(model).path, Path(target)
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise SettingError(f"{target}: wanted the path of a file to write, in a folder that is there")
    with opened(path) as file:
        reference, recorder = reference_model(file), InputRecorder(file)
        windows = reference.windows(text, tokens)
        saved = Checkpoint(
            partial_folder(target), run_key("importance", file_key(file), reference.window, windows)
        )
        _recorded(reference, windows, recorder, saved, report)
    write_importance(target, recorder.sums, dataset, len(windows), reference.window)
    saved.remove()
    return len(recorder.sums)


def _recorded(
    reference: ReferenceModel,
    windows: list[tuple[int, ...]],
    recorder: InputRecorder,
    saved: Checkpoint,
    report: Report | None,
) -> None:
    """Process the windows that a former run hasn't; store the sums after each."""
    first, stored = 0, saved.load(SUMS)
    if stored is not None:
        first = int(stored.pop("windows"))
        recorder.restore(stored)
    for done in range(first, len(windows)):
        backend = reference.backend()
        backend.observer = recorder.seen
        backend.forward(backend.embed(windows[done]), 0)
        saved.store(SUMS, {**recorder.stored(), "windows": np.array(done + 1)})
        if report:
            report("measuring importance", done + 1, len(windows))
