"""Quantizes a whole model file to another mix of formats: plans first, then writes piece by piece."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.errors import FormatError, printable
from edgeinfer_quant_formats.formats import FormatSpec
from edgeinfer_quant_formats.gguf.metadata import Metadata
from edgeinfer_quant_formats.gguf.part_names import SPLIT_KEYS
from edgeinfer_quant_formats.gguf.reader import GGUFFile
from edgeinfer_quant_formats.gguf.tensor_index import TensorInfo
from edgeinfer_quant_formats.gguf.writer import GGUFWriter
from edgeinfer_quant_formats.quantizer.encoding_pool import EncodingPool, Piece
from edgeinfer_quant_formats.quantizer.importance_file import Importance
from edgeinfer_quant_formats.quantizer.mix_rules import SourceModel
from edgeinfer_quant_formats.quantizer.mixes import Mix
from edgeinfer_quant_formats.quantizer.tensor_roles import OUTPUT, TOKEN_EMBEDDINGS, layer_of
from edgeinfer_quant_formats.quantizer.type_selection import TypeOptions, select_types

FILE_TYPE_KEY = "general.file_type"
VERSION_KEY, VERSION = "general.quantization_version", 2
IMPORTANCE_KEYS = {
    "file": "quantize.imatrix.file",
    "dataset": "quantize.imatrix.dataset",
    "entries": "quantize.imatrix.entries_count",
    "chunks": "quantize.imatrix.chunks_count",
}

NEEDS_IMPORTANCE = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS")
"""Formats that give a useless model without an importance matrix, as in llama.cpp."""

PIECE_WEIGHTS = 1 << 20
MIN_WEIGHTS_FOR_WORKERS = 1 << 23

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The plan for one tensor; `requested` is its format if its rows filled whole blocks of it."""

    info: TensorInfo
    target: FormatSpec
    requested: FormatSpec
    importance: NDArray[np.float32] | None = None

    @property
    def nbytes(self) -> int:
        return self.target.nbytes(self.info.shape)

    @property
    def is_copied(self) -> bool:
        return self.target == self.info.format

    @property
    def is_requantized(self) -> bool:
        """Whether the source is already quantized, so that errors accumulate."""
        return not self.is_copied and self.info.format.block_elements > 1


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """The plan for a file's tensors, in file order."""

    mix: Mix
    model: SourceModel
    tensors: tuple[TensorPlan, ...]
    without_importance: tuple[str, ...] = ()
    """Tensors without an entry in the given importance matrix."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def weights(self) -> int:
        return sum(int(np.prod(tensor.info.shape, dtype=np.int64)) for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / max(self.weights, 1)


def plan_quantization(
    file: GGUFFile, mix: Mix, options: TypeOptions | None = None, importance: Importance | None = None
) -> QuantizationPlan:
    """Choose the format of every tensor of an open file. Reads no weights.

    Raises:
        FormatError: a requested format whose blocks the rows can't fill, an importance of another size.
    """
    layers = 1 + max((layer_of(name) for name in file.tensors), default=0)
    model = SourceModel.from_metadata(
        file.metadata, layers, has_importance=importance is not None, tied_output=OUTPUT not in file.tensors
    )
    choices = select_types(file.tensors.values(), model, mix, options)
    plans, missing = [], []
    for name, info in file.tensors.items():
        choice, columns = choices[name], None
        if importance is not None and choice.format != info.format:
            columns = _importance_of(info, importance)
            if columns is None and name not in (OUTPUT, *TOKEN_EMBEDDINGS):
                missing.append(name)
        plans.append(TensorPlan(info, choice.format, choice.requested, columns))
    return QuantizationPlan(mix, model, tuple(plans), tuple(missing))


def missing_importance(plan: QuantizationPlan) -> str | None:
    """What is missing if a tensor's format needs an importance that it does not have."""
    for tensor in plan.tensors:
        needs = tensor.target.name in NEEDS_IMPORTANCE and not tensor.is_copied
        if needs and tensor.importance is None and tensor.info.name not in (OUTPUT, *TOKEN_EMBEDDINGS):
            name = printable(tensor.info.name)
            return f"{name}: {tensor.target.name} needs an importance matrix that names it"
    return None


def plan_as_it_is(file: GGUFFile) -> QuantizationPlan:
    """Every tensor in its current format."""
    layers = 1 + max((layer_of(name) for name in file.tensors), default=0)
    model = SourceModel.from_metadata(
        file.metadata, layers, has_importance=False, tied_output=OUTPUT not in file.tensors
    )
    stated = file.metadata.get(FILE_TYPE_KEY)
    mix = Mix("as it is", stated if type(stated) is int else 0, "F32", 32.0)
    plans = tuple(TensorPlan(info, info.format, info.format) for info in file.tensors.values())
    return QuantizationPlan(mix, model, plans)


def _importance_of(info: TensorInfo, importance: Importance) -> NDArray[np.float32] | None:
    values = importance.tensors.get(info.name)
    matrices = int(np.prod(info.shape[:-2]))
    if values is None or values.size == matrices * info.shape[-1]:
        return None if values is None else values.reshape(matrices, -1)
    if info.name in TOKEN_EMBEDDINGS:
        # An embedding is a lookup, not a matmul: counts under its name are those of the tied output.
        return None
    raise FormatError(
        f"{printable(info.name)}: importance of {values.size} columns, wanted {matrices * info.shape[-1]}; "
        "the importance matrix is of another model"
    )


def write_quantized(
    file: GGUFFile,
    plan: QuantizationPlan,
    target: str | Path,
    metadata: Mapping[str, Any] | None = None,
    processes: int = 1,
    progress: Progress | None = None,
) -> None:
    """Write the plan's file atomically; keeps only a few pieces of a tensor in memory.

    `metadata` is added to that of the source. `progress` is called with bytes read and total bytes.

    Raises:
        FormatError: weights that a format can't hold.
        OSError: the target can't be written, or a worker process has ended unexpectedly.
    """
    writer = GGUFWriter(target, _kept_metadata(file, metadata or {}))
    writer.add_metadata(VERSION_KEY, VERSION)
    writer.add_metadata(FILE_TYPE_KEY, plan.mix.file_type)
    for key, value in (metadata or {}).items():
        writer.add_metadata(key, value)
    work = sum(tensor.info.nbytes // tensor.info.format.block_bytes * tensor.info.format.block_elements
               for tensor in plan.tensors if not tensor.is_copied)  # fmt: skip
    with EncodingPool(processes if work >= MIN_WEIGHTS_FOR_WORKERS else 1) as pool:
        changed = [tensor for tensor in plan.tensors if not tensor.is_copied]
        stream = _Stream(file, progress, pool.recoded(_all_pieces(file, changed)))
        for tensor in plan.tensors:
            source = partial(stream.copy if tensor.is_copied else stream.take, tensor)
            writer.add_tensor(tensor.info.name, source, tensor.target, tensor.info.shape)
        writer.write()


def _kept_metadata(file: GGUFFile, replaced: Mapping[str, Any]) -> Mapping[str, Any]:
    removed = {FILE_TYPE_KEY, VERSION_KEY, *SPLIT_KEYS, *replaced}
    if isinstance(file.metadata, Metadata):
        return file.metadata.without(removed)
    return {key: value for key, value in file.metadata.items() if key not in removed}


def _piece_rows(tensor: TensorPlan) -> list[tuple[int, int, int]]:
    """(matrix, first row, last row + 1) of each piece; with one importance for all, pieces span matrices."""
    columns = tensor.info.shape[-1]
    rows = int(np.prod(tensor.info.shape[:-1]))
    matrices = 1 if tensor.importance is None else len(tensor.importance)
    rows_each, step = rows // matrices, max(1, PIECE_WEIGHTS // columns)
    return [
        (matrix, matrix * rows_each + start, matrix * rows_each + min(start + step, rows_each))
        for matrix in range(matrices)
        for start in range(0, rows_each, step)
    ]


def _all_pieces(file: GGUFFile, tensors: Iterable[TensorPlan]) -> Iterator[Callable[[], Piece]]:
    for tensor in tensors:
        for matrix, start, end in _piece_rows(tensor):
            yield partial(_piece, file, tensor, matrix, slice(start, end))


def _piece(file: GGUFFile, tensor: TensorPlan, matrix: int, rows: slice) -> Piece:
    raw = file.raw(tensor.info.name)
    importance = None if tensor.importance is None else tensor.importance[matrix]
    return Piece(
        name=tensor.info.name,
        raw=raw.reshape(-1, raw.shape[-1])[rows].tobytes(),
        source=tensor.info.format.name,
        target=tensor.target.name,
        importance=importance,
    )


class _Stream:
    """Provides the writer with each tensor's bytes in order."""

    def __init__(self, file: GGUFFile, progress: Progress | None, recoded: Iterator[bytes]) -> None:
        self._file = file
        self._progress = progress
        self._recoded = recoded
        self._done = 0

    def copy(self, tensor: TensorPlan) -> Iterator[NDArray[np.uint8]]:
        """The unmodified bytes."""
        flat = self._file.raw(tensor.info.name).reshape(-1)
        for start in range(0, flat.size, PIECE_WEIGHTS):
            yield flat[start : start + PIECE_WEIGHTS]
        self._advance(tensor.info, tensor.info.nbytes)
        self._file.release(tensor.info.name)

    def take(self, tensor: TensorPlan) -> Iterator[bytes]:
        """The next pieces from the pool, which belong to this tensor."""
        row_bytes = tensor.info.format.row_bytes(tensor.info.shape[-1])
        for _, start, end in _piece_rows(tensor):
            yield next(self._recoded)
            self._advance(tensor.info, (end - start) * row_bytes)
        self._file.release(tensor.info.name)

    def _advance(self, info: TensorInfo, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._file.nbytes)
