"""Files of PowerInfer, read as if they were ordinary GGUF files of the same model.

They have down transposed (`ffn_down_t`), a predictor of active neurons in each layer (`fc1`, `fc2`), and
don't name the ReLU that PowerInfer applies. A quantized down is stored again in Q8_0, because its blocks are
along the other dimension.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.hugging_face.computed_tensors import ComputedTensors
from edgeinfer.hugging_face.folder_file import COMPUTED
from edgeinfer.hugging_face.stored import Stored
from edgeinfer_quant_formats import GGUFFile, block_format, decode, encode
from edgeinfer_quant_formats.gguf.tensor_index import TensorInfo

DOWN = re.compile(r"(blk\.\d+\.ffn_down)_t(\.weight)")
PREDICTOR = re.compile(r"blk\.\d+\.fc[12]\.weight")
THRESHOLD_KEY = "powerinfer.sparse_threshold"
UNCHANGED = ("F32", "F16", "BF16")
BAMBOO, LLAMA = "bamboo", "llama"
"""Bamboo is a Llama whose gate and up are both rectified."""
Floats = NDArray[np.float32]


def is_powerinfer(file: GGUFFile) -> bool:
    """Whether a file is in PowerInfer's dialect."""
    return any(DOWN.fullmatch(name) for name in file.tensors)


class PowerInferFile(GGUFFile):
    """The model of `file`, which it closes. `spill`: see `ComputedTensors`."""

    def __init__(self, file: GGUFFile, spill: Path | None) -> None:
        self._file = file
        downs = dict(self._downs())
        self._computed = ComputedTensors(file.path, downs, spill)
        self._parts = []
        self.path, self.origin, self.parts = file.path, file.origin, file.parts
        self.version, self.alignment, self.check_size = file.version, file.alignment, file.check_size
        self.metadata = MappingProxyType(_metadata(file.metadata))
        self.tensors = MappingProxyType(dict(self._listed(downs)))
        self.nbytes = sum(info.nbytes for info in self.tensors.values())

    def _downs(self) -> Iterator[tuple[str, Stored]]:
        for name, info in self._file.tensors.items():
            if (match := DOWN.fullmatch(name)) and len(info.shape) == 2:
                kind = info.format if info.format.name in UNCHANGED else block_format("Q8_0")
                yield "".join(match.groups()), Stored(info.shape[::-1], kind, self._transposed(name))

    def _transposed(self, name: str) -> Callable[[], NDArray[np.uint8]]:
        def load() -> NDArray[np.uint8]:
            kind = self._file.tensors[name].format
            values = np.ascontiguousarray(self._file.decode(name).T).reshape(-1)
            return encode(values, kind if kind.name in UNCHANGED else block_format("Q8_0"))

        return load

    def _listed(self, downs: Mapping[str, Stored]) -> Iterator[tuple[str, TensorInfo]]:
        for name, info in self._file.tensors.items():
            if not DOWN.fullmatch(name) and not PREDICTOR.fullmatch(name):
                yield name, info
        for name, down in downs.items():
            yield name, TensorInfo(name, down.shape, down.format, 0, down.nbytes, COMPUTED)

    def predictor(self, layer: int) -> tuple[Floats, Floats] | None:
        """The matrices fc1 (rank, hidden size) and fc2 (neurons, rank) of a layer; None: it has none."""
        names = [f"blk.{layer}.fc{number}.weight" for number in (1, 2)]
        if not all(name in self._file.tensors for name in names):
            return None
        first, second = (self._file.decode(name) for name in names)
        return first, second

    @property
    def threshold(self) -> float:
        """The score above which a neuron is computed."""
        value = self.metadata.get(THRESHOLD_KEY, 0.0)
        return float(value) if isinstance(value, int | float) else 0.0

    def raw(self, name: str) -> NDArray[np.uint8]:
        """As `GGUFFile.raw`."""
        info = self._info(name)
        if info.part != COMPUTED:
            return self._file.raw(name)
        return self._computed.bytes_of(name).reshape(*info.shape[:-1], -1)

    def decode(self, name: str) -> Floats:
        """As `GGUFFile.decode`."""
        info = self._info(name)
        if info.part != COMPUTED:
            return self._file.decode(name)
        return decode(self._computed.bytes_of(name), info.format).reshape(info.shape)

    def prepare(self, progress: Callable[[int, int], None] | None) -> None:
        """Transpose all matrices, with progress in bytes."""
        self._computed.prepare(progress)

    def release(self, name: str) -> bool:
        """As `GGUFFile.release`."""
        is_computed = self._info(name).part == COMPUTED
        return self._computed.release(name) if is_computed else self._file.release(name)

    def read_in_order(self, name: str) -> bool:
        """As `GGUFFile.read_in_order`."""
        return self._info(name).part != COMPUTED and self._file.read_in_order(name)

    def close(self) -> None:
        """Close the file, and forget what is computed."""
        self._computed.close()
        self._file.close()


def _metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata with the activation, and with the name of an architecture that others have."""
    architecture = metadata.get("general.architecture")
    is_bamboo, values = architecture == BAMBOO, dict(metadata)
    if is_bamboo:
        values = {re.sub(rf"^{BAMBOO}\.", f"{LLAMA}.", key): value for key, value in metadata.items()}
        architecture = values["general.architecture"] = LLAMA
    values.setdefault(f"{architecture}.hidden_activation", "drelu" if is_bamboo else "relu")
    return values
