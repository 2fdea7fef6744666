"""The reader on valid files: from gguf-py, from GGUFWriter, versions, parts, views of the map."""

import mmap
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from edgeinfer_quant_formats import FORMATS, FormatError, GGUFFile, GGUFWriter, TensorInfo, decode
from tests.quant_formats import raw_gguf as raw
from tests.quant_formats.raw_gguf import RawGGUF, RawTensor

Reader = Callable[[str], Any]


def gguf_py_file(path: Path) -> Path:
    """A small file from gguf-py's writer with every metadata type and most tensor types."""
    random = np.random.default_rng(31)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.uint8", 200)
    writer.add_int8("a.int8", -100)
    writer.add_uint16("a.uint16", 60000)
    writer.add_int16("a.int16", -30000)
    writer.add_uint32("a.uint32", 4_000_000_000)
    writer.add_int32("a.int32", -2_000_000_000)
    writer.add_uint64("a.uint64", 2**64 - 1)
    writer.add_int64("a.int64", -(2**63))
    writer.add_float32("a.float32", 0.5)
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "naïve ▁ 😀")
    writer.add_array("a.strings", ["", "a", "ÿ", "▁the"])
    writer.add_array("a.integers", [1, -2, 3])
    writer.add_array("a.floats", [0.5, -1.5])
    writer.add_array("a.bools", [True, False])
    writer.add_tensor("norm", random.standard_normal(7).astype(np.float32))
    writer.add_tensor("cube", random.standard_normal((2, 3, 5)).astype(np.float16))
    writer.add_tensor("counts", np.arange(6, dtype=np.int32).reshape(2, 3))
    for name in ("BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"):
        kind = gguf.GGMLQuantizationType[name]
        weights = random.standard_normal((3, 512)).astype(np.float32)
        writer.add_tensor(f"blk.{name}", gguf.quants.quantize(weights, kind), raw_dtype=kind)
    for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"):
        blocks = random.integers(0, 256, (3, 2 * FORMATS[name].block_bytes), dtype=np.uint8)
        writer.add_tensor(f"blk.{name}", blocks, raw_dtype=gguf.GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_reads_as_gguf_py(path: Path) -> None:
    reference = gguf.GGUFReader(path)
    with GGUFFile.open(path) as file:
        expected = {name: item for name, item in reference.fields.items() if not name.startswith("GGUF.")}
        assert list(file.metadata) == list(expected)
        for key, item in expected.items():
            value = file.metadata[key]
            value = value.tolist() if isinstance(value, np.ndarray) else value
            assert value == item.contents()
            assert type(value) is type(item.contents())
        assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
        for tensor in reference.tensors:
            info = file.tensors[tensor.name]
            assert info.shape == tuple(int(size) for size in tensor.shape[::-1])
            assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
            assert info.format.type_id == tensor.tensor_type
            np.testing.assert_array_equal(
                file.raw(tensor.name).reshape(-1), tensor.data.view(np.uint8).reshape(-1)
            )
            if tensor.tensor_type == gguf.GGMLQuantizationType.I32:
                continue
            with np.errstate(all="ignore"):
                weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(file.decode(tensor.name).reshape(weights.shape), weights)


def test_a_file_of_gguf_py_is_parsed_as_by_gguf_py(tmp_path: Path) -> None:
    assert_reads_as_gguf_py(gguf_py_file(tmp_path / "model.gguf"))


def test_a_file_of_the_writer_is_parsed_as_by_gguf_py(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with GGUFFile.open(gguf_py_file(tmp_path / "source.gguf")) as source:
        writer = GGUFWriter(path, source.metadata, alignment=64)
        for name, info in source.tensors.items():
            writer.add_tensor(name, source.raw(name), info.format, info.shape)
        writer.write()
    assert_reads_as_gguf_py(path)


def test_values_have_python_and_numpy_types(tmp_path: Path) -> None:
    with GGUFFile.open(gguf_py_file(tmp_path / "model.gguf")) as file:
        metadata = file.metadata
        assert metadata["a.uint64"] == 2**64 - 1
        assert metadata["a.int64"] == -(2**63)
        assert type(metadata["a.bool"]) is bool
        assert type(metadata["a.float32"]) is float
        assert metadata["a.string"] == "naïve ▁ 😀"
        assert metadata["a.strings"] == ["", "a", "ÿ", "▁the"]
        assert metadata["a.integers"].dtype == np.int32
        assert metadata["a.floats"].dtype == np.float32
        assert metadata["a.bools"].dtype == bool
        assert "a.missing" not in metadata
        with pytest.raises(KeyError, match=r"a\.missing"):
            metadata["a.missing"]


def test_invalid_utf8_is_kept_as_surrogates(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    strings = raw.array(raw.STRING, 2, raw.string(b"\xff\xfe") + raw.string("ok"))
    path.write_bytes(RawGGUF([("a", raw.STRING, raw.string(b"x\xf0")), ("b", raw.ARRAY, strings)]).build())
    with GGUFFile.open(path) as file:
        assert file.metadata["a"].encode("utf-8", "surrogateescape") == b"x\xf0"
        assert [text.encode("utf-8", "surrogateescape") for text in file.metadata["b"]] == [
            b"\xff\xfe",
            b"ok",
        ]


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_open(tmp_path: Path, version: int) -> None:
    path = tmp_path / "model.gguf"
    weights = np.arange(8, dtype="<f4")
    path.write_bytes(RawGGUF([], [RawTensor()], weights.tobytes(), version=version).build())
    with GGUFFile.open(path) as file:
        assert file.version == version
        assert file.alignment == 32
        np.testing.assert_array_equal(file.decode("weight"), weights)


def test_a_file_of_metadata_only_opens(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(RawGGUF([("a", raw.UINT32, raw.uint32(2**32 - 1))]).build().rstrip(b"\0"))
    with GGUFFile.open(path) as file:
        assert (dict(file.metadata), dict(file.tensors), file.nbytes) == ({"a": 2**32 - 1}, {}, 0)


def test_tensor_bytes_are_views_of_the_map(tmp_path: Path) -> None:
    with GGUFFile.open(gguf_py_file(tmp_path / "model.gguf")) as file:
        view = file.raw("blk.Q4_K")
        assert view.shape == (3, 288)
        assert view.dtype == np.uint8
        assert not view.flags.owndata
        assert not view.flags.writeable
        assert np.shares_memory(view, file.raw("blk.Q4_K"))
        assert file.raw("cube").shape == (2, 3, 10)
        assert file.tensors["blk.Q4_K"] == TensorInfo(
            "blk.Q4_K", (3, 512), FORMATS["Q4_K"], file.tensors["blk.Q4_K"].offset, 864, 0
        )
        assert file.nbytes == sum(info.nbytes for info in file.tensors.values())


def test_a_view_remains_valid_after_closing(tmp_path: Path) -> None:
    file = GGUFFile.open(gguf_py_file(tmp_path / "model.gguf"))
    view, expected = file.raw("norm"), file.decode("norm")
    file.close()
    file.close()
    np.testing.assert_array_equal(decode(view, "F32"), expected)
    with pytest.raises(FormatError, match="the file is closed, wanted an open one"):
        file.raw("norm")


def test_metadata_of_a_closed_file_is_an_error(tmp_path: Path) -> None:
    with GGUFFile.open(gguf_py_file(tmp_path / "model.gguf")) as file:
        seen = file.metadata["a.string"]
    assert file.metadata["a.string"] == seen
    with pytest.raises(FormatError, match=r"a\.int8: the file is closed, wanted an open one"):
        file.metadata["a.int8"]


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with GGUFFile.open(gguf_py_file(tmp_path / "model.gguf")) as file:
        for look_up in (file.raw, file.decode, file.release, file.read_in_order):
            with pytest.raises(FormatError, match=r"model\.gguf: no tensor blk\.9\.nothing among its 19"):
                look_up("blk.9.nothing")


def test_a_released_tensor_is_read_again_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    weights = np.random.default_rng(32).standard_normal((64, 1024)).astype(np.float32)
    with GGUFWriter(path) as writer:
        writer.add_tensor("small", weights[0, :3], "F32")
        writer.add_tensor("large", weights, "F32")
    with GGUFFile.open(path) as file:
        before = file.raw("large").copy()
        assert file.read_in_order("large") == file.read_in_order("small") == hasattr(mmap, "MADV_SEQUENTIAL")
        file.release("large")
        file.release("small")
        np.testing.assert_array_equal(file.raw("large"), before)


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="needs madvise")
def test_without_madvise_no_pages_are_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_DONTNEED")
    monkeypatch.delattr(mmap, "MADV_SEQUENTIAL")
    with GGUFFile.open(gguf_py_file(tmp_path / "model.gguf")) as file:
        assert not file.release("norm")
        assert not file.read_in_order("norm")


@pytest.mark.slow
def test_a_vocabulary_of_150000_strings_opens_and_decodes_quickly(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    tokens = [f"Ġtoken{index}" for index in range(150_000)]
    GGUFWriter(path, {"tokenizer.ggml.tokens": tokens}).write()
    looping, opening, decoding = [], [], []
    for _ in range(5):
        start = time.perf_counter()
        for index in range(150_000):
            struct.unpack_from("<Q", b"12345678", index - index)
        looped = time.perf_counter()
        with GGUFFile.open(path) as file:
            opened = time.perf_counter()
            seen = file.metadata["tokenizer.ggml.tokens"]
        decoding.append(time.perf_counter() - opened)
        opening.append(opened - looped)
        looping.append(looped - start)
        assert seen == tokens
    # Measured against the minimum that Python needs per string, which takes about 0.02 s.
    assert min(opening) < 4 * min(looping)
    assert min(decoding) < 12 * min(looping)
