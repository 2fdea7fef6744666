"""A Hugging Face folder that is read as if it were a GGUF file."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.hugging_face.computed_tensors import ComputedTensors
from edgeinfer.hugging_face.stored import Stored
from edgeinfer_quant_formats import GGUFFile, decode
from edgeinfer_quant_formats.gguf.tensor_index import TensorInfo
from edgeinfer_quant_formats.gguf.value_types import DEFAULT_ALIGNMENT
from edgeinfer_quant_formats.safetensors.sharded import ShardedTensors

NO_VERSION = 0
"""The version of GGUF of what is no GGUF file."""
COMPUTED = -1
"""The part of a tensor whose bytes no file of the folder has."""


class FolderFile(GGUFFile):
    """The model of a folder: metadata and tensors under GGUF names.

    Tensors with the layout of GGUF are views of the mapped files. The others are computed when their bytes
    are first read, see `ComputedTensors`; `spill`: as there.
    """

    def __init__(
        self,
        folder: Path,
        tensors: ShardedTensors,
        metadata: Mapping[str, Any],
        stored: Mapping[str, Stored],
        spill: Path | None,
    ) -> None:
        self._files = tensors
        computed = {name: each for name, each in stored.items() if not each.source}
        self._computed = ComputedTensors(folder, computed, spill)
        self._parts = []
        self.path, self.origin = tensors.files[0].path, folder
        self.parts = tuple(file.path for file in tensors.files)
        self.version = NO_VERSION
        self.alignment = DEFAULT_ALIGNMENT
        self.metadata = MappingProxyType(dict(metadata))
        self.tensors = MappingProxyType({name: self._listed(name, each) for name, each in stored.items()})
        self.nbytes = sum(info.nbytes for info in self.tensors.values())
        self.check_size = self._check_files

    def _listed(self, name: str, stored: Stored) -> TensorInfo:
        part, offset = COMPUTED, 0
        if stored.source:
            part, info = self._files.tensors[stored.source]
            offset = info.offset
        return TensorInfo(name, stored.shape, stored.format, offset, stored.nbytes, part)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """As `GGUFFile.raw`."""
        info = self._info(name)
        row_bytes = info.format.row_bytes(info.shape[-1])
        return self._bytes_of(info).reshape(*info.shape[:-1], row_bytes)

    def decode(self, name: str) -> NDArray[np.float32]:
        """As `GGUFFile.decode`."""
        info = self._info(name)
        return decode(self._bytes_of(info), info.format).reshape(info.shape)

    def _bytes_of(self, info: TensorInfo) -> NDArray[np.uint8]:
        if info.part == COMPUTED:
            return self._computed.bytes_of(info.name)
        return self._files.files[info.part].bytes_of(info)

    def prepare(self, progress: Callable[[int, int], None] | None) -> None:
        """Compute the large tensors whose layout is another one, with progress in bytes."""
        self._computed.prepare(progress)

    def release(self, name: str) -> bool:
        """As `GGUFFile.release`."""
        info = self._info(name)
        if info.part == COMPUTED:
            return self._computed.release(name)
        return self._files.files[info.part].release(info)

    def read_in_order(self, name: str) -> bool:
        """As `GGUFFile.read_in_order`."""
        info = self._info(name)
        return info.part != COMPUTED and self._files.files[info.part].read_in_order(info)

    def _check_files(self) -> None:
        for file in self._files.files:
            file.check_size()

    def close(self) -> None:
        """Close the maps, and forget what is computed."""
        self._computed.close()
        self._files.close()
