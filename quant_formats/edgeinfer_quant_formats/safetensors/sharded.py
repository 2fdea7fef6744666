"""The tensors of a folder: one safetensors file, or several that an index lists."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from edgeinfer_quant_formats.errors import FormatError, printable
from edgeinfer_quant_formats.safetensors.reader import SafetensorsFile, SafetensorsInfo

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20


class ShardedTensors:
    """The open files of a folder. `tensors`: name -> (number of its file, entry)."""

    def __init__(self, files: list[SafetensorsFile]) -> None:
        self.files = files
        self.tensors: dict[str, tuple[int, SafetensorsInfo]] = {}
        for number, file in enumerate(files):
            for name, info in file.tensors.items():
                if name in self.tensors:
                    other = files[self.tensors[name][0]].path
                    raise FormatError(
                        f"{printable(file.path)}: tensor {printable(name)} is in {printable(other.name)} too"
                    )
                self.tensors[name] = number, info

    @classmethod
    def open(cls, folder: Path) -> "ShardedTensors":
        """Open all files of a folder.

        Raises:
            FormatError: there is none, one that the index lists is missing, or one is damaged.
            OSError: a file can't be opened.
        """
        index = folder / INDEX
        names = _listed(index) if index.is_file() else {SINGLE: []}
        files: list[SafetensorsFile] = []
        try:
            for name, tensors in names.items():
                if not (folder / name).is_file():
                    raise FormatError(
                        f"{printable(folder)}: {printable(name)} is missing, wanted all of its files"
                    )
                files.append(SafetensorsFile(folder / name))
                for tensor in tensors:
                    if tensor not in files[-1].tensors:
                        raise FormatError(
                            f"{printable(folder / name)}: tensor {printable(tensor)} is missing, which "
                            f"{INDEX} lists there"
                        )
            return cls(files)
        except BaseException:
            for file in files:
                file.close()
            raise

    def array(self, name: str) -> NDArray[Any]:
        """A read-only view of a tensor."""
        return self.files[self.tensors[name][0]].array(name)

    def close(self) -> None:
        """Close the maps."""
        for file in self.files:
            file.close()


def _listed(index: Path) -> Mapping[str, list[str]]:
    """File name -> its tensors. Raises `FormatError`: a damaged index, or names that leave the folder."""
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise FormatError(f"{printable(index)}: more than {MAX_INDEX_BYTES} bytes, wanted a list of tensors")
    try:
        weights = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        pairs = [(str(tensor), str(name)) for tensor, name in weights.items()]
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        raise FormatError(f"{printable(index)}: wanted a JSON object with a weight_map") from None
    files: dict[str, list[str]] = {}
    for tensor, name in pairs:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise FormatError(f"{printable(index)}: file {printable(name)}, wanted a .safetensors file there")
        files.setdefault(name, []).append(tensor)
    if not files:
        raise FormatError(f"{printable(index)}: its weight_map is empty, wanted tensors")
    return dict(sorted(files.items()))
