"""A GGUF file that is described instead of read: metadata and tensor table, without bytes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from edgeinfer_quant_formats.errors import FormatError, printable
from edgeinfer_quant_formats.gguf.reader import GGUFFile
from edgeinfer_quant_formats.gguf.tensor_index import TensorInfo
from edgeinfer_quant_formats.gguf.value_types import DEFAULT_ALIGNMENT, VERSIONS


class DescribedFile(GGUFFile):
    """The header of a file that needn't exist. Everything that reads the bytes of a tensor raises
    `FormatError`.
    """

    def __init__(self, name: str, metadata: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> None:
        self._parts = []
        self.path = self.origin = Path(f"{name}.gguf")
        self.parts = ()
        self.version = max(VERSIONS)
        self.alignment = DEFAULT_ALIGNMENT
        self.metadata = MappingProxyType(dict(metadata))
        self.tensors = MappingProxyType({info.name: info for info in tensors})
        self.nbytes = sum(info.nbytes for info in tensors)
        self.check_size = lambda: None

    def _info(self, name: str) -> TensorInfo:
        raise FormatError(
            f"{printable(self.path)}: {printable(name)}: only the header is known, wanted a whole file"
        )
