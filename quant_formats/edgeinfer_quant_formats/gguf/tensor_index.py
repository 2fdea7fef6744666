"""The tensor table of a GGUF file: names, shapes, formats, and checked bounds."""

import operator
from bisect import bisect_right
from dataclasses import dataclass, replace

from edgeinfer_quant_formats.errors import FormatError, printable
from edgeinfer_quant_formats.formats import FormatSpec, block_format, listed_format
from edgeinfer_quant_formats.gguf.cursor import Cursor

MAX_TENSORS = 65536
MAX_DIMENSIONS = 4
SMALLEST_RECORD_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: location and format of its bytes.

    `shape` is in numpy order (rows, columns), the reverse of the file's. `offset` counts from the start of
    its file, which is `parts[part]` of its `GGUFFile`.
    """

    name: str
    shape: tuple[int, ...]
    format: FormatSpec
    offset: int
    nbytes: int
    part: int


def read_tensor_table(
    cursor: Cursor, count: int, alignment: int, part: int, *, unknown_types: bool = False
) -> dict[str, TensorInfo]:
    """Read `count` tensor records at the cursor and check their locations.

    `unknown_types`: list tensors of types without a codec too; they take the bytes up to the next tensor.

    Raises:
        UnsupportedTypeError: a type without a codec.
        FormatError: a shape without weights or with rows
            that don't fill whole blocks, a duplicate name, an offset that is misaligned, bytes outside
            the file or within another tensor.
    """
    room = min(MAX_TENSORS, (cursor.end - cursor.position) // SMALLEST_RECORD_BYTES)
    if count > room:
        raise cursor.error(f"{count} tensors, wanted at most {room}")
    tensors: dict[str, TensorInfo] = {}
    for index in range(count):
        cursor.location = f"tensor {index} of {count}"
        name = cursor.name("name")
        cursor.location = f"tensor {printable(name)}"
        if name in tensors:
            raise cursor.error("duplicate name")
        tensors[name] = _read_record(cursor, name, alignment, part, unknown_types)
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {name: replace(info, offset=data_start + info.offset) for name, info in tensors.items()}
    if unknown_types:
        tensors = _with_sizes_to_the_next(cursor, tensors)
    _check_bounds(cursor, tensors)
    return tensors


def _with_sizes_to_the_next(cursor: Cursor, tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The table, in which tensors of unknown types end where the next tensor starts, or the file ends."""
    starts = sorted({info.offset for info in tensors.values()} | {cursor.end})
    sized = dict(tensors)
    for name, info in tensors.items():
        if not info.format.is_known:
            following = starts[bisect_right(starts, info.offset) :]
            sized[name] = replace(info, nbytes=following[0] - info.offset if following else 0)
    return sized


def _read_record(cursor: Cursor, name: str, alignment: int, part: int, unknown_types: bool) -> TensorInfo:
    dimensions = cursor.uint32("number of dimensions")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.error(f"{dimensions} dimensions, wanted 1 to {MAX_DIMENSIONS}")
    shape = tuple(cursor.uint64("dimension") for _ in range(dimensions))[::-1]
    type_number = cursor.uint32("type")
    offset = cursor.uint64("offset")
    try:
        kind = listed_format(type_number) if unknown_types else block_format(type_number)
        nbytes = kind.nbytes(shape)
    except FormatError as error:
        raise type(error)(str(cursor.error(str(error)))) from None
    if offset % alignment:
        raise cursor.error(f"offset {offset}, wanted a multiple of the alignment {alignment}")
    return TensorInfo(name, shape, kind, offset, nbytes, part)


def _check_bounds(cursor: Cursor, tensors: dict[str, TensorInfo]) -> None:
    before: TensorInfo | None = None
    for info in sorted(tensors.values(), key=operator.attrgetter("offset")):
        cursor.location = f"tensor {printable(info.name)}"
        end = info.offset + info.nbytes
        if end > cursor.end:
            raise cursor.error(
                f"{info.format.name} of shape {info.shape} takes {info.nbytes} bytes from offset "
                f"{info.offset} to {end}, wanted an end at most {cursor.end}, the size of the file"
            )
        if before is not None and info.offset < before.offset + before.nbytes:
            raise cursor.error(
                f"starts at offset {info.offset}, within {printable(before.name)}; "
                f"wanted at least {before.offset + before.nbytes}"
            )
        before = info
