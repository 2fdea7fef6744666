"""Reads GGUF files, with sets of parts as one: metadata, tensor table and the mapped bytes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.codecs import decode
from edgeinfer_quant_formats.errors import FormatError, UnsupportedTypeError, printable
from edgeinfer_quant_formats.formats import missing_format_error
from edgeinfer_quant_formats.gguf.file_part import FilePart
from edgeinfer_quant_formats.gguf.part_names import SPLIT_KEYS, open_parts
from edgeinfer_quant_formats.gguf.tensor_index import TensorInfo


class GGUFFile:
    """An open GGUF model: one file, or all parts of a set.

    `metadata` is that of the first part, without the part numbers; `tensors` holds those of all parts in file
    order.
    Source: the GGUF specification, versions 2 and 3, little-endian.
    """

    def __init__(self, parts: list[FilePart]) -> None:
        self._parts = parts
        first = parts[0]
        self.path = first.path
        self.origin = first.path
        """What the user names: the file, or a folder with files."""
        self.parts = tuple(part.path for part in parts)
        self.version = first.version
        self.alignment = first.alignment
        self.metadata: Mapping[str, Any] = first.metadata.without(SPLIT_KEYS if len(parts) > 1 else ())
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: info for part in parts for name, info in part.tensors.items()}
        )
        self.nbytes = sum(info.nbytes for info in self.tensors.values())
        self.check_size: Callable[[], None] = first.check_size if len(parts) == 1 else self._check_parts
        """Raises `FormatError` if the file has been truncated since it was opened; a closed file isn't
        checked. It is called for each step.
        """

    @classmethod
    def open(cls, path: str | Path, *, unknown_types: bool = False) -> Self:
        """Map a GGUF file; any part of a set opens the whole set.

        `unknown_types`: list tensors of types without a codec too, instead of raising an error; their bytes
        can't be read.

        Raises:
            UnsupportedTypeError: a tensor has a type without a codec.
            FormatError: a damaged file, or a part that is missing or of another set.
            OSError: the file can't be opened.
        """
        return cls(open_parts(Path(path), unknown_types=unknown_types))

    def has_text(self, key: str, text: str) -> bool:
        """Whether the metadata value of a key is this text; an array, which compares by element, isn't."""
        value = self.metadata.get(key)
        return isinstance(value, str) and value == text

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, (rows..., bytes of a row), as a read-only view of the memory map.

        Raises:
            FormatError: no tensor with that name, or the file is closed.
        """
        info = self._readable(name)
        row_bytes = info.format.row_bytes(info.shape[-1])
        return self._parts[info.part].bytes_of(info).reshape(*info.shape[:-1], row_bytes)

    def decode(self, name: str) -> NDArray[np.float32]:
        """The weights of a tensor in float32, in its shape.

        Raises:
            FormatError: no tensor with that name, or the file is closed.
        """
        info = self._readable(name)
        return decode(self._parts[info.part].bytes_of(info), info.format).reshape(info.shape)

    def release(self, name: str) -> bool:
        """Release the tensor's whole pages from memory; they can be read again.

        False if the system doesn't support it.
        """
        info = self._info(name)
        return self._parts[info.part].release(info)

    def read_in_order(self, name: str) -> bool:
        """Advise the system that the tensor will be read sequentially. False if it isn't supported."""
        info = self._info(name)
        return self._parts[info.part].read_in_order(info)

    def _check_parts(self) -> None:
        for part in self._parts:
            part.check_size()

    def close(self) -> None:
        """Close the maps. Arrays from `raw` stay valid; metadata that hasn't been read is lost."""
        for part in self._parts:
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _readable(self, name: str) -> TensorInfo:
        """The entry of a tensor whose type has a codec."""
        info = self._info(name)
        if not info.format.is_known:
            reason = missing_format_error(info.format.type_id)
            raise UnsupportedTypeError(f"{printable(self.path)}: tensor {printable(name)}: {reason}")
        return info

    def _info(self, name: str) -> TensorInfo:
        try:
            return self.tensors[name]
        except KeyError:
            raise FormatError(
                f"{printable(self.path)}: no tensor {printable(name)} among its {len(self.tensors)}"
            ) from None
