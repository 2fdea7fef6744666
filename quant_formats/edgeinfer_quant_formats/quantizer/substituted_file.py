"""A view of an open file in which some tensors have other formats and other bytes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.codecs import decode
from edgeinfer_quant_formats.formats import FormatSpec
from edgeinfer_quant_formats.gguf.reader import GGUFFile
from edgeinfer_quant_formats.gguf.tensor_index import TensorInfo

Load = Callable[[], NDArray[np.uint8]]


class SubstitutedFile(GGUFFile):
    """The tensors of `file`, with those of `substitutes` (name -> format, and a function that returns the
    bytes). The source stays open; closing the view closes nothing.
    """

    def __init__(self, file: GGUFFile, substitutes: Mapping[str, tuple[FormatSpec, Load]]) -> None:
        self._file = file
        self._loads = {name: load for name, (_, load) in substitutes.items()}
        self.path, self.origin, self.parts = file.path, file.origin, file.parts
        self.version, self.alignment, self.metadata = file.version, file.alignment, file.metadata
        self.check_size = file.check_size
        self.tensors = MappingProxyType(
            {
                name: _in_format(info, substitutes[name][0]) if name in substitutes else info
                for name, info in file.tensors.items()
            }
        )
        self.nbytes = sum(info.nbytes for info in self.tensors.values())

    def raw(self, name: str) -> NDArray[np.uint8]:
        """As `GGUFFile.raw`."""
        if name not in self._loads:
            return self._file.raw(name)
        info = self.tensors[name]
        return self._loads[name]().reshape(*info.shape[:-1], info.format.row_bytes(info.shape[-1]))

    def decode(self, name: str) -> NDArray[np.float32]:
        """As `GGUFFile.decode`."""
        if name not in self._loads:
            return self._file.decode(name)
        info = self.tensors[name]
        return decode(self._loads[name](), info.format).reshape(info.shape)

    def release(self, name: str) -> bool:
        """As `GGUFFile.release`."""
        return name not in self._loads and self._file.release(name)

    def read_in_order(self, name: str) -> bool:
        """As `GGUFFile.read_in_order`."""
        return name not in self._loads and self._file.read_in_order(name)

    def close(self) -> None:
        """Does nothing: the source is closed by who opened it."""


def _in_format(info: TensorInfo, spec: FormatSpec) -> TensorInfo:
    return replace(info, format=spec, nbytes=spec.nbytes(info.shape))
