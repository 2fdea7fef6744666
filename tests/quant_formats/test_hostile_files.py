"""Damaged and hostile files: one FormatError each, with the position, the value and the expected value."""

import os
import struct
import sys
import tracemalloc
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from edgeinfer_quant_formats import FormatError, GGUFFile
from tests.quant_formats import raw_gguf as raw
from tests.quant_formats.raw_gguf import RawGGUF, RawTensor

HUGE = 2**64 - 1
Refusal = Callable[[bytes | RawGGUF], str]


@pytest.fixture
def refusal(tmp_path: Path) -> Refusal:
    """Write the file, check that it is refused within little memory, and return the message."""

    numbers = count()

    def refuse(content: bytes | RawGGUF) -> str:
        # A file for each: that of a failure stays mapped as long as its traceback, and Windows keeps it.
        path = tmp_path / f"hostile-{next(numbers)}.gguf"
        path.write_bytes(content.build() if isinstance(content, RawGGUF) else content)
        tracemalloc.start()
        try:
            with pytest.raises(FormatError) as caught:
                GGUFFile.open(path)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
        message = str(caught.value)
        assert message.startswith(f"{path}: ")
        assert message.isprintable()
        assert len(message) < 1000
        return message.removeprefix(f"{path}: ")

    return refuse


def test_an_empty_file(refusal: Refusal) -> None:
    assert refusal(b"") == "header: the file has 0 bytes, wanted a GGUF file of at least 24"


def test_another_kind_of_file(refusal: Refusal) -> None:
    message = refusal(b"PK\x03\x04" + bytes(100))
    assert message == r"header: magic b'PK\x03\x04', wanted b'GGUF': not a GGUF file"


def test_a_big_endian_file(refusal: Refusal) -> None:
    message = refusal(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    assert message == "header: big-endian GGUF of version 3, wanted little-endian"


def test_version_1(refusal: Refusal) -> None:
    assert refusal(RawGGUF(version=1)).startswith("header: GGUF version 1, wanted 2 or 3")


@pytest.mark.parametrize("version", [0, 4, 2**32 - 1])
def test_an_unknown_version(refusal: Refusal, version: int) -> None:
    assert refusal(RawGGUF(version=version)) == f"header: GGUF version {version}, wanted 2 or 3"


@pytest.mark.parametrize("count", [4, 2**31, 2**63, HUGE])
def test_a_count_of_keys_that_the_file_cannot_hold(refusal: Refusal, count: int) -> None:
    message = refusal(RawGGUF([("a", raw.UINT32, raw.uint32(1))], key_count=count))
    assert message == f"header: {count} metadata keys, wanted at most 3"


@pytest.mark.parametrize("count", [2, 2**31, 2**63, HUGE])
def test_a_count_of_tensors_that_the_file_cannot_hold(refusal: Refusal, count: int) -> None:
    message = refusal(RawGGUF([], [RawTensor(dims=(4,))], bytes(2), tensor_count=count))
    assert message == f"header: {count} tensors, wanted at most 1"


@pytest.mark.parametrize("length", [65536, 2**31, 2**63, HUGE])
def test_a_key_of_absurd_length(refusal: Refusal, length: int) -> None:
    content = bytearray(RawGGUF([("a", raw.UINT32, raw.uint32(1))]).build())
    content[24:32] = raw.uint64(length)
    message = refusal(bytes(content))
    assert message == f"metadata key 0 of 1: key of {length} bytes, wanted at most 65535"


@pytest.mark.parametrize("length", [2**31, 2**62, HUGE])
def test_a_string_of_absurd_length(refusal: Refusal, length: int) -> None:
    content = RawGGUF([("name", raw.STRING, raw.uint64(length) + b"x")])
    size = len(content.build())
    assert refusal(content) == (
        f"metadata key name: string takes {length} bytes at offset 48, wanted at most {size - 48} "
        f"(the file ends at {size})"
    )


@pytest.mark.parametrize("count", [2**31, 2**61 + 1, HUGE])
def test_an_array_of_absurd_length(refusal: Refusal, count: int) -> None:
    message = refusal(RawGGUF([("list", raw.ARRAY, raw.array(raw.FLOAT64, count, bytes(8)))]))
    assert message.startswith(f"metadata key list: array of {count} float64 values takes {8 * count} bytes")
    assert "wanted at most" in message


@pytest.mark.parametrize("count", [100, 2**61, HUGE])
def test_an_array_of_more_strings_than_the_file_can_hold(refusal: Refusal, count: int) -> None:
    message = refusal(RawGGUF([("list", raw.ARRAY, raw.array(raw.STRING, count, raw.string("a")))]))
    assert message.startswith(f"metadata key list: array of {count} strings takes at least {8 * count} bytes")


@pytest.mark.parametrize("length", [1000, 2**63, HUGE])
@pytest.mark.parametrize("last", [True, False])
def test_a_string_in_an_array_that_leaves_the_file(refusal: Refusal, length: int, last: bool) -> None:
    strings = raw.string("a") + raw.uint64(length) + (b"" if last else raw.string("b"))
    content = RawGGUF([("list", raw.ARRAY, raw.array(raw.STRING, 2 if last else 3, strings))])
    message = refusal(content)
    assert message.startswith("metadata key list: string 1 of the array ends at offset ")
    assert message.endswith(f"the file, which ends at {len(content.build())}")


def test_strings_that_would_take_too_much_memory(tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    count = 1 << 20
    path.write_bytes(
        RawGGUF([("list", raw.ARRAY, raw.array(raw.STRING, count, raw.string("ab") * count))]).build()
    )
    with pytest.raises(
        FormatError, match=r"list: 1048576 strings of 2097152 bytes may take \d+ bytes of memory"
    ):
        GGUFFile.open(path)


def test_nested_arrays(refusal: Refusal) -> None:
    nested = raw.array(raw.UINT8, 1, b"\x01")
    for _ in range(1000):
        nested = raw.array(raw.ARRAY, 1, nested)
    message = refusal(RawGGUF([("list", raw.ARRAY, nested)]))
    assert message == "metadata key list: array of arrays, wanted an array of numbers, bools or strings"


@pytest.mark.parametrize("number", [13, 255, 2**32 - 1])
def test_an_unknown_value_type(refusal: Refusal, number: int) -> None:
    expected = f"metadata key a: value type {number}, wanted 0 to 12"
    assert refusal(RawGGUF([("a", number, bytes(8))])) == expected
    assert refusal(RawGGUF([("a", raw.ARRAY, raw.array(number, 1, bytes(8)))])) == expected


def test_an_invalid_bool(refusal: Refusal) -> None:
    expected = "metadata key a: bool of value 2, wanted 0 or 1"
    assert refusal(RawGGUF([("a", raw.BOOL, b"\x02")])) == expected
    assert refusal(RawGGUF([("a", raw.ARRAY, raw.array(raw.BOOL, 3, b"\x01\x02\x00"))])) == expected


def test_a_key_twice(refusal: Refusal) -> None:
    keys = [("a", raw.UINT8, b"\x01"), ("a", raw.UINT8, b"\x02")]
    assert refusal(RawGGUF([*keys])) == "metadata key a: duplicate key"


@pytest.mark.parametrize("alignment", [0, 3, 48, 2**32 - 1])
def test_an_alignment_that_is_no_power_of_two(refusal: Refusal, alignment: int) -> None:
    message = refusal(RawGGUF([("general.alignment", raw.UINT32, raw.uint32(alignment))]))
    assert message == f"header: general.alignment {alignment}, wanted a power of two"


def test_an_alignment_of_another_type(refusal: Refusal) -> None:
    message = refusal(RawGGUF([("general.alignment", raw.UINT64, raw.uint64(32))]))
    assert message == "header: general.alignment of type UINT64, wanted UINT32"
    message = refusal(RawGGUF([("general.alignment", raw.ARRAY, raw.array(raw.UINT32, 1, raw.uint32(32)))]))
    assert message == "header: general.alignment of type array of UINT32, wanted UINT32"
    message = refusal(RawGGUF([("general.alignment", raw.FLOAT32, struct.pack("<f", float("nan")))]))
    assert message == "header: general.alignment of type FLOAT32, wanted UINT32"


def test_an_alignment_beyond_the_file(refusal: Refusal) -> None:
    keys = [("general.alignment", raw.UINT32, raw.uint32(2**31))]
    message = refusal(RawGGUF([*keys], [RawTensor()], bytes(32)))
    assert "from offset 2147483648 to 2147483680, wanted an end at most" in message


def test_a_tensor_name_twice(refusal: Refusal) -> None:
    tensors = [RawTensor("blk.0.attn_q.weight"), RawTensor("blk.0.attn_q.weight", offset=32)]
    message = refusal(RawGGUF([], tensors, bytes(64)))
    assert message == "tensor blk.0.attn_q.weight: duplicate name"


@pytest.mark.parametrize("dimensions", [0, 5, 2**31, 2**32 - 1])
def test_too_few_or_too_many_dimensions(refusal: Refusal, dimensions: int) -> None:
    message = refusal(RawGGUF([], [RawTensor(dims=(1,) * 5, dimensions=dimensions)], bytes(64)))
    assert message == f"tensor weight: {dimensions} dimensions, wanted 1 to 4"


def test_a_dimension_of_zero(refusal: Refusal) -> None:
    message = refusal(RawGGUF([], [RawTensor(dims=(8, 0))], bytes(64)))
    assert message == "tensor weight: shape (0, 8): wanted at least one dimension, each at least 1"


@pytest.mark.parametrize("dims", [(2**62,), (2**32, 2**32), (HUGE, HUGE, HUGE, HUGE), (2**63, 2)])
def test_dimensions_that_overflow(refusal: Refusal, dims: tuple[int, ...]) -> None:
    content = RawGGUF([], [RawTensor(dims=dims)], bytes(64))
    message = refusal(content)
    assert message.startswith(f"tensor weight: F32 of shape {dims[::-1]} takes ")
    assert message.endswith(f"wanted an end at most {len(content.build())}, the size of the file")


@pytest.mark.parametrize(("number", "name"), [(9, "Q8_1"), (15, "Q8_K"), (4, "Q4_2"), (31, "Q4_0_4_4")])
def test_a_tensor_type_that_is_not_supported(refusal: Refusal, number: int, name: str) -> None:
    message = refusal(RawGGUF([], [RawTensor(dims=(256,), type=number)], bytes(300)))
    assert message.startswith(
        f"tensor weight: type {name} ({number}) is not supported; supported: F32, F16, "
    )


@pytest.mark.parametrize("number", [99, 2**32 - 1])
def test_an_unknown_tensor_type(refusal: Refusal, number: int) -> None:
    message = refusal(RawGGUF([], [RawTensor(type=number)], bytes(64)))
    assert message.startswith(f"tensor weight: type number {number} is unknown; supported: F32, F16, ")


def test_a_row_of_part_blocks(refusal: Refusal) -> None:
    message = refusal(RawGGUF([], [RawTensor("blk.0.ffn_up.weight", dims=(100, 4), type=12)], bytes(999)))
    assert (
        message == "tensor blk.0.ffn_up.weight: row of 100 weights is not a multiple of the Q4_K block (256)"
    )


@pytest.mark.parametrize("offset", [1, 31, 33, HUGE])
def test_an_offset_that_is_not_aligned(refusal: Refusal, offset: int) -> None:
    message = refusal(RawGGUF([], [RawTensor(offset=offset)], bytes(128)))
    assert message == f"tensor weight: offset {offset}, wanted a multiple of the alignment 32"


@pytest.mark.parametrize("offset", [64, 2**32, 2**63, 2**64 - 32])
def test_an_offset_beyond_the_file(refusal: Refusal, offset: int) -> None:
    content = RawGGUF([], [RawTensor(offset=offset)], bytes(64))
    start = len(content.build()) - 64 + offset
    assert refusal(content) == (
        f"tensor weight: F32 of shape (8,) takes 32 bytes from offset {start} to {start + 32}, "
        f"wanted an end at most {len(content.build())}, the size of the file"
    )


def test_tensors_that_overlap(refusal: Refusal) -> None:
    content = RawGGUF([], [RawTensor("late", (8,), offset=32), RawTensor("early", (16,))], bytes(64))
    start = len(content.build()) - 64
    expected = f"tensor late: starts at offset {start + 32}, within early; wanted at least {start + 64}"
    assert refusal(content) == expected
    same = RawGGUF([], [RawTensor("one"), RawTensor("two")], bytes(64))
    assert "tensor two: starts at offset" in refusal(same)


def test_names_of_control_characters_and_broken_utf8_are_quoted_safely(refusal: Refusal) -> None:
    message = refusal(RawGGUF([(b"\x1b[31m\xff", 99, b"")]))
    assert message == r"metadata key \x1b[31m\udcff: value type 99, wanted 0 to 12"
    message = refusal(RawGGUF([], [RawTensor(b"\n" * 500, type=99)], bytes(64)))
    assert message.startswith("tensor " + r"\n" * 120 + "...: type number 99")


def whole_file() -> bytes:
    keys = [
        ("general.name", raw.STRING, raw.string("whole")),
        ("list", raw.ARRAY, raw.array(raw.STRING, 3, raw.string("a") * 3)),
        ("numbers", raw.ARRAY, raw.array(raw.INT32, 3, bytes(12))),
        ("flag", raw.BOOL, b"\x01"),
    ]
    tensors = [RawTensor("first", (8, 2)), RawTensor("second", (32,), type=8, offset=64)]
    return RawGGUF([*keys], tensors, bytes(64 + 34)).build()


def test_a_file_cut_anywhere(refusal: Refusal, tmp_path: Path) -> None:
    content = whole_file()
    (tmp_path / "whole.gguf").write_bytes(content)
    GGUFFile.open(tmp_path / "whole.gguf").close()
    for size in range(len(content)):
        message = refusal(content[:size])
        assert "wanted" in message


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="is a directory, wanted a GGUF file"):
        GGUFFile.open(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(FormatError, match="is no regular file, wanted a GGUF file"):
        GGUFFile.open(tmp_path / "pipe.gguf")


def test_a_missing_file_raises_the_system_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.gguf"):
        GGUFFile.open(tmp_path / "nothing.gguf")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_refused_file_is_closed(refusal: Refusal) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        refusal(RawGGUF(version=9))
    assert len(os.listdir("/proc/self/fd")) == before
