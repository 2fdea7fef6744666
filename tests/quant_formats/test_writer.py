"""The writer: types of values, sources of tensors, and files that are complete or absent."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer_quant_formats import FormatError, GGUFFile, GGUFWriter, decode, encode
from edgeinfer_quant_formats.codecs import ENCODERS
from edgeinfer_quant_formats.gguf.metadata import Metadata
from edgeinfer_quant_formats.gguf.value_types import ValueType

WEIGHTS = np.random.default_rng(51).standard_normal((6, 512)).astype(np.float32)


@pytest.mark.parametrize(
    ("value", "kind", "is_array"),
    [
        (True, ValueType.BOOL, False),
        (5, ValueType.UINT32, False),
        (2**32 - 1, ValueType.UINT32, False),
        (-5, ValueType.INT32, False),
        (2**32, ValueType.UINT64, False),
        (2**64 - 1, ValueType.UINT64, False),
        (-(2**40), ValueType.INT64, False),
        (0.5, ValueType.FLOAT32, False),
        ("text ▁", ValueType.STRING, False),
        (np.uint8(7), ValueType.UINT8, False),
        (np.int16(-7), ValueType.INT16, False),
        (np.float64(0.1), ValueType.FLOAT64, False),
        (np.bool_(False), ValueType.BOOL, False),
        (["a", "", "ÿ"], ValueType.STRING, True),
        ([], ValueType.STRING, True),
        ([1, 2, -3], ValueType.INT32, True),
        ([1, 2**32 - 1], ValueType.UINT32, True),
        ([-1, 2**40], ValueType.INT64, True),
        ([0.5, 2], ValueType.FLOAT32, True),
        ([True, False], ValueType.BOOL, True),
        ([np.uint16(3), np.uint16(4)], ValueType.UINT16, True),
        (("a", "b"), ValueType.STRING, True),
        (np.array(["a", "bc"]), ValueType.STRING, True),
        (np.arange(3, dtype=np.uint8), ValueType.UINT8, True),
        (np.arange(3, dtype=">i4"), ValueType.INT32, True),
        (np.array([0.1, 0.2]), ValueType.FLOAT64, True),
    ],
)
def test_values_round_trip_with_their_type(
    tmp_path: Path, value: Any, kind: ValueType, is_array: bool
) -> None:
    with GGUFWriter(tmp_path / "model.gguf") as writer:
        writer.add_metadata("key", value)
    with GGUFFile.open(tmp_path / "model.gguf") as file:
        assert isinstance(file.metadata, Metadata)
        assert file.metadata.type_of("key") is kind
        assert file.metadata.is_array("key") is is_array
        seen = file.metadata["key"]
        assert (list(seen) if is_array else seen) == (list(value) if is_array else value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "NoneType None, wanted a bool, number, string or list"),
        (b"ab", "bytes .*, wanted a bool, number, string or list"),
        (2**64, "integers from 18446744073709551616 to 18446744073709551616, wanted them to fit 64 bits"),
        ([-1, 2**63], "integers from -1 to 9223372036854775808, wanted them to fit 64 bits"),
        (["a", 1], "list of int, str, wanted strings, bools or numbers of one kind"),
        ([True, 2], "list of bool, int, wanted strings"),
        ([[1], [2]], "list of list, wanted strings"),
        (np.zeros((2, 2)), r"array of shape \(2, 2\), wanted one dimension"),
        (np.float16(1), "float16 1.0, wanted a bool"),
        (np.zeros(2, complex), "array of complex128, wanted bools"),
    ],
)
def test_values_that_gguf_cannot_hold_are_refused(tmp_path: Path, value: Any, message: str) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf")
    with pytest.raises(FormatError, match=rf"model\.gguf: metadata key a\.key: {message}"):
        writer.add_metadata("a.key", value)


def test_keys_and_names_are_unique_and_of_bounded_length(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", {"key": 1})
    for key in ("key", "", "x" * 65536):
        with pytest.raises(FormatError, match="wanted a new key of 1 to 65535 bytes"):
            writer.add_metadata(key, 1)
    writer.add_tensor("name", WEIGHTS, "F32")
    with pytest.raises(FormatError, match=r"model\.gguf: tensor name: the name is taken, wanted a new one"):
        writer.add_tensor("name", WEIGHTS, "F32")


@pytest.mark.parametrize("alignment", [0, -32, 48])
def test_an_alignment_that_is_no_power_of_two_is_refused(tmp_path: Path, alignment: int) -> None:
    with pytest.raises(FormatError, match=f"alignment {alignment}, wanted a power of two"):
        GGUFWriter(tmp_path / "model.gguf", alignment=alignment)


def test_the_alignment_of_the_writer_overrides_the_metadata(tmp_path: Path) -> None:
    with GGUFWriter(tmp_path / "model.gguf", {"general.alignment": 64, "key": 1}, alignment=128) as writer:
        writer.add_tensor("one", WEIGHTS[0, :3], "F32")
        writer.add_tensor("two", WEIGHTS, "F32")
    with GGUFFile.open(tmp_path / "model.gguf") as file:
        assert file.alignment == 128
        assert dict(file.metadata) == {"general.alignment": 128, "key": 1}
        assert [info.offset % 128 for info in file.tensors.values()] == [0, 0]
        np.testing.assert_array_equal(file.decode("two"), WEIGHTS)


def test_a_copy_of_a_file_is_the_same_bytes(tmp_path: Path) -> None:
    values = {"a": np.uint16(1), "b": [0.5], "c": "x", "d": ["x", "y"], "e": np.float64(0.1), "f": True}
    with GGUFWriter(tmp_path / "source.gguf", values) as writer:
        writer.add_tensor("w", WEIGHTS, "Q4_K")
    with GGUFFile.open(tmp_path / "source.gguf") as source:
        copy = GGUFWriter(tmp_path / "copy.gguf", source.metadata)
        copy.add_tensor("w", source.raw("w"), "Q4_K")
        copy.write()
    assert (tmp_path / "copy.gguf").read_bytes() == (tmp_path / "source.gguf").read_bytes()


def pieces() -> Iterator[Any]:
    yield WEIGHTS[:2]
    yield encode(WEIGHTS[2:4], "Q8_0")
    yield encode(WEIGHTS[4:], "Q8_0").tobytes()


SOURCES: dict[str, Callable[[], Any]] = {
    "weights": lambda: WEIGHTS,
    "weights in float64": lambda: WEIGHTS.astype(np.float64),
    "weights that are not contiguous": lambda: np.repeat(WEIGHTS, 2, axis=1)[:, ::2],
    "raw array": lambda: encode(WEIGHTS, "Q8_0"),
    "raw bytes": lambda: encode(WEIGHTS, "Q8_0").tobytes(),
    "memory view": lambda: memoryview(encode(WEIGHTS, "Q8_0").tobytes()),
    "pieces": lambda: list(pieces()),
    "callable": lambda: lambda: WEIGHTS,
    "callable of pieces": lambda: pieces,
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_kind_of_source_gives_the_same_file(tmp_path: Path, source: str) -> None:
    with GGUFWriter(tmp_path / "model.gguf") as writer:
        writer.add_tensor("w", SOURCES[source](), "Q8_0", WEIGHTS.shape)
        writer.add_tensor("after", WEIGHTS[0], "F32")
    with GGUFFile.open(tmp_path / "model.gguf") as file:
        np.testing.assert_array_equal(file.raw("w").reshape(-1), encode(WEIGHTS, "Q8_0"))
        np.testing.assert_array_equal(file.decode("after"), WEIGHTS[0])


@pytest.mark.parametrize("name", ENCODERS)
def test_weights_are_encoded_into_the_requested_format(tmp_path: Path, name: str) -> None:
    with GGUFWriter(tmp_path / "model.gguf") as writer:
        writer.add_tensor("w", WEIGHTS, name)
    with GGUFFile.open(tmp_path / "model.gguf") as file:
        assert file.tensors["w"].format.name == name
        assert file.tensors["w"].shape == WEIGHTS.shape
        np.testing.assert_array_equal(file.decode("w").reshape(-1), decode(encode(WEIGHTS, name), name))


def test_a_callable_is_called_only_when_the_file_is_written(tmp_path: Path) -> None:
    requested: list[str] = []

    def source() -> Any:
        requested.append("yes")
        return WEIGHTS

    writer = GGUFWriter(tmp_path / "model.gguf")
    writer.add_tensor("w", source, "F16", WEIGHTS.shape)
    assert requested == []
    writer.write()
    assert requested == ["yes"]


@pytest.mark.parametrize(
    ("source", "format_name", "shape", "message"),
    [
        (bytes(10), "F32", None, "shape missing, wanted one for a source of type bytes"),
        (np.zeros((2, 100)), "Q4_K", None, r"row of 100 weights is not a multiple of the Q4_K block \(256\)"),
        (
            np.zeros((2, 100), np.uint8),
            "Q4_K",
            None,
            r"raw bytes of shape \(2, 100\), wanted rows of whole Q4_K",
        ),
        (WEIGHTS, "Q9_Z", None, "format Q9_Z is unknown; supported: F32"),
        (WEIGHTS, "Q8_K", None, "format Q8_K is not supported"),
        (np.zeros((1, 1, 1, 1, 1)), "F32", None, "5 dimensions, wanted at most 4"),
        (np.float32(1), "F32", (), r"shape \(\): wanted at least one dimension"),
    ],
)
def test_tensors_that_do_not_fit_their_format_are_refused(
    tmp_path: Path, source: Any, format_name: str, shape: Any, message: str
) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf")
    with pytest.raises(FormatError, match=rf"model\.gguf: tensor blk\.0: {message}"):
        writer.add_tensor("blk.0", source, format_name, shape)


@pytest.mark.parametrize(("rows", "message"), [(5, "gave 10240 bytes"), (7, "gave at least 14336 bytes")])
def test_a_source_of_the_wrong_size_is_refused_and_leaves_no_file(
    tmp_path: Path, rows: int, message: str
) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf")
    writer.add_tensor("w", lambda: np.resize(WEIGHTS, (rows, 512)), "F32", WEIGHTS.shape)
    expected = rf"tensor w: the source {message}, wanted 12288 for F32 of shape \(6, 512\)"
    with pytest.raises(FormatError, match=expected):
        writer.write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError])
def test_a_failed_write_leaves_only_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"old")

    def source() -> Iterator[bytes]:
        yield bytes(100)
        raise error

    writer = GGUFWriter(path)
    writer.add_tensor("w", source, "F32", WEIGHTS.shape)
    with pytest.raises(error):
        writer.write()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_inside_the_with_block_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"), GGUFWriter(tmp_path / "model.gguf"):
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_raises_the_system_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        GGUFWriter(tmp_path / "nowhere" / "model.gguf").write()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows replaces no mapped file; see below")
def test_an_open_file_may_be_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with GGUFWriter(path) as writer:
        writer.add_tensor("w", WEIGHTS, "F32")
    with GGUFFile.open(path) as file:
        with GGUFWriter(path, file.metadata) as writer:
            writer.add_tensor("w", lambda: file.decode("w"), "Q6_K", WEIGHTS.shape)
        np.testing.assert_array_equal(file.decode("w"), WEIGHTS)
    with GGUFFile.open(path) as file:
        assert file.tensors["w"].format.name == "Q6_K"


@pytest.mark.skipif(sys.platform != "win32", reason="other systems replace mapped files")
def test_a_mapped_file_is_in_use(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    GGUFWriter(path).write()
    before = path.read_bytes()
    with GGUFFile.open(path), pytest.raises(PermissionError, match="in use by another program"):
        GGUFWriter(path).write()
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.skipif(os.name != "posix", reason="needs a umask")
def test_a_file_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    GGUFWriter(tmp_path / "model.gguf").write()
    (tmp_path / "usual").write_bytes(b"")
    assert (tmp_path / "model.gguf").stat().st_mode == (tmp_path / "usual").stat().st_mode
