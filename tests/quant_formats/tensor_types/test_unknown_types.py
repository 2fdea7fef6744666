"""Tensors of types without a codec: refused by name when a file is opened, and listed on request."""

from pathlib import Path

import numpy as np
import pytest

from edgeinfer_quant_formats import FormatError, GGUFFile
from edgeinfer_quant_formats.errors import UnsupportedTypeError
from tests.quant_formats.raw_gguf import RawGGUF, RawTensor

NUMBERS = {15: "Q8_K", 77: "type 77", 2**32 - 1: "type 4294967295"}


def file_with(folder: Path, number: int) -> Path:
    """A file with a tensor of this type between two of F32, and another one at its end."""
    tensors = [
        RawTensor("first", (8,)),
        RawTensor("a", (256, 2), type=number, offset=32),
        RawTensor("last", (8,), offset=512),
        RawTensor("b", (3,), type=number, offset=544),
    ]
    path = folder / "model.gguf"
    path.write_bytes(RawGGUF([], tensors, np.ones(152, "<f4").tobytes()).build())
    return path


@pytest.mark.parametrize(("number", "name"), NUMBERS.items())
def test_a_file_with_unknown_types_is_listed(tmp_path: Path, number: int, name: str) -> None:
    with GGUFFile.open(file_with(tmp_path, number), unknown_types=True) as file:
        listed = {info.name: (info.format.name, info.nbytes) for info in file.tensors.values()}
        assert listed == {"first": ("F32", 32), "a": (name, 480), "last": ("F32", 32), "b": (name, 64)}
        assert [info.name for info in file.tensors.values() if not info.format.is_known] == ["a", "b"]
        np.testing.assert_array_equal(file.decode("last"), np.ones(8, np.float32))


@pytest.mark.parametrize("number", NUMBERS)
def test_the_bytes_of_a_listed_tensor_are_refused_with_its_name_and_type(tmp_path: Path, number: int) -> None:
    with GGUFFile.open(file_with(tmp_path, number), unknown_types=True) as file:
        for read in (file.raw, file.decode):
            with pytest.raises(UnsupportedTypeError, match=rf"tensor a: type .*{number}.* is "):
                read("a")


@pytest.mark.parametrize("number", NUMBERS)
def test_a_file_with_unknown_types_is_refused_unless_it_is_listed(tmp_path: Path, number: int) -> None:
    with pytest.raises(UnsupportedTypeError, match=rf"tensor a: type .*{number}.* is "):
        GGUFFile.open(file_with(tmp_path, number))


def test_listed_tensors_must_not_overlap_and_must_be_in_the_file(tmp_path: Path) -> None:
    for offset, reason in ((0, "within"), (1 << 20, "wanted an end at most")):
        tensors = [RawTensor("first", (8,)), RawTensor("a", (256,), type=77, offset=offset)]
        path = tmp_path / "damaged.gguf"
        path.write_bytes(RawGGUF([], tensors, bytes(64)).build())
        with pytest.raises(FormatError, match=reason):
            GGUFFile.open(path, unknown_types=True)
