"""Sources of a tensor's bytes for the writer: arrays, raw blocks, or a callable that is evaluated
on writing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.codecs import encode
from edgeinfer_quant_formats.errors import FormatError
from edgeinfer_quant_formats.formats import FormatSpec

Block = bytes | bytearray | memoryview | NDArray[Any]
TensorSource = Block | Iterable[Block] | Callable[[], Block | Iterable[Block]]

# Float arrays are encoded in pieces of about this many weights, to avoid a second copy of a tensor.
PIECE_WEIGHTS = 1 << 22


def is_raw(array: NDArray[Any]) -> bool:
    """Whether an array holds encoded bytes instead of weights: uint8 is never a weight."""
    return array.dtype == np.uint8


def shape_of(source: TensorSource, kind: FormatSpec, shape: Sequence[int] | None) -> tuple[int, ...]:
    """The shape of a tensor to be written, by default that of the source.

    Raises:
        FormatError: no shape is given or known, or the two differ in size.
    """
    if shape is not None:
        return tuple(int(size) for size in shape)
    if not isinstance(source, np.ndarray):
        raise FormatError(f"shape missing, wanted one for a source of type {type(source).__name__}")
    if not is_raw(source):
        return source.shape
    if source.ndim < 1 or source.shape[-1] % kind.block_bytes:
        raise FormatError(
            f"raw bytes of shape {source.shape}, wanted rows of whole {kind.name} blocks "
            f"({kind.block_bytes} bytes)"
        )
    return (*source.shape[:-1], source.shape[-1] // kind.block_bytes * kind.block_elements)


def blocks_of(source: TensorSource, kind: FormatSpec) -> Iterator[bytes | memoryview]:
    """The tensor's bytes in pieces; weights are encoded into `kind`."""
    if callable(source):
        source = source()
    if isinstance(source, bytes | bytearray | memoryview):
        yield memoryview(source)
    elif isinstance(source, np.ndarray):
        yield from _array_blocks(source, kind)
    else:
        for piece in source:
            yield from blocks_of(piece, kind)


def _array_blocks(array: NDArray[Any], kind: FormatSpec) -> Iterator[memoryview]:
    if is_raw(array):
        yield np.ascontiguousarray(array).reshape(-1).data
        return
    flat = np.ascontiguousarray(array).reshape(-1)
    for start in range(0, flat.size, PIECE_WEIGHTS):
        yield encode(flat[start : start + PIECE_WEIGHTS], kind).data
