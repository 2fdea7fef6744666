"""Decoding, bit for bit as gguf-py does: on random bits, on every special scale, on real ranges."""

import ctypes
import tracemalloc

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer_quant_formats import FORMATS, FormatError, decode
from tests.quant_formats.quantizer_errors import ggml_library

NUMBERS = ("F64", "I8", "I16", "I32", "I64")
BLOCK_FORMATS = [name for name in FORMATS if name not in NUMBERS]
BLOCKS = 5000

# Zeros, the smallest and largest subnormal and normal float16, one, infinities, quiet and signalling NaN.
SPECIAL_F16 = (0x0000, 0x8000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x7D01)
F16_OFFSETS = {
    name: tuple(range(spec.scales.offset, spec.scales.offset + 2 * spec.scales.count, 2))
    for name, spec in FORMATS.items()
    if spec.scales and spec.scales.unit == 2
}
# gguf-py has no codec for Q1_0 and Q2_0; their formulas are tested by themselves.
WITHOUT_GGUF_PY = ("Q1_0", "Q2_0")
READ_BY_GGUF_PY = [name for name in BLOCK_FORMATS if name not in WITHOUT_GGUF_PY]


def by_gguf_py(raw: NDArray[np.uint8], name: str) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        weights = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    return np.asarray(weights, np.float32).reshape(-1)


def assert_same_bits(seen: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    same = (seen.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(seen) & np.isnan(expected))
    assert seen.shape == expected.shape
    assert same.all(), f"{(~same).sum()} of {same.size} differ"


@pytest.mark.parametrize("name", READ_BY_GGUF_PY)
def test_random_bits_decode_as_in_gguf_py(name: str) -> None:
    shape = (BLOCKS, FORMATS[name].block_bytes)
    raw = np.random.default_rng(11).integers(0, 256, shape, dtype=np.uint8)
    assert_same_bits(decode(raw, name), by_gguf_py(raw, name))


@pytest.mark.parametrize("name", [name for name in F16_OFFSETS if name not in WITHOUT_GGUF_PY])
def test_special_scales_decode_as_in_gguf_py(name: str) -> None:
    offsets = F16_OFFSETS[name]
    shape = (len(SPECIAL_F16) ** 2, FORMATS[name].block_bytes)
    raw = np.random.default_rng(12).integers(0, 256, shape, dtype=np.uint8)
    first, second = np.meshgrid(SPECIAL_F16, SPECIAL_F16)
    for offset, scales in zip(offsets, (first, second), strict=False):
        raw[:, offset : offset + 2] = scales.reshape(-1, 1).astype("<u2").view(np.uint8)
    assert_same_bits(decode(raw, name), by_gguf_py(raw, name))


def test_q1_0_is_plus_or_minus_its_scale() -> None:
    raw = np.random.default_rng(18).integers(0, 256, (len(SPECIAL_F16), 18), dtype=np.uint8)
    raw[:, :2] = np.array(SPECIAL_F16, "<u2")[:, None].view(np.uint8)
    d = raw[:, :2].copy().view("<f2").astype(np.float32)
    signs = (raw[:, 2:, None] >> np.arange(8, dtype=np.uint8)) & 1
    assert_same_bits(decode(raw, "Q1_0"), np.where(signs.reshape(-1, 128), d, -d).reshape(-1))


def test_q2_0_is_minus_one_to_two_times_its_scale() -> None:
    raw = np.random.default_rng(20).integers(0, 256, (len(SPECIAL_F16), 18), dtype=np.uint8)
    raw[:, :2] = np.array(SPECIAL_F16, "<u2")[:, None].view(np.uint8)
    d = raw[:, :2].copy().view("<f2").astype(np.float32)
    codes = (raw[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3
    with np.errstate(all="ignore"):
        expected = (codes.reshape(-1, 64).astype(np.float32) - np.float32(1)) * d
    assert_same_bits(decode(raw, "Q2_0"), expected.reshape(-1))


@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", ["Q1_0", "Q2_0", "NVFP4", *(n for n, spec in FORMATS.items() if spec.grid)])
def test_random_bits_decode_as_in_llama_cpp(name: str) -> None:
    pytest.importorskip("llama_cpp")
    spec = FORMATS[name]
    raw = np.random.default_rng(19).integers(0, 256, (BLOCKS, spec.block_bytes), dtype=np.uint8)
    expected = np.empty(spec.block_elements * BLOCKS, np.float32)
    dequantize = getattr(ggml_library(), f"dequantize_row_{name.lower()}")
    dequantize(
        ctypes.c_void_p(raw.ctypes.data), ctypes.c_void_p(expected.ctypes.data), ctypes.c_int64(expected.size)
    )
    assert_same_bits(decode(raw, name), expected)


def test_every_scale_of_nvfp4_decodes_as_in_gguf_py() -> None:
    raw = np.random.default_rng(21).integers(0, 256, (256, 36), dtype=np.uint8)
    raw[:, :4] = (np.arange(256)[:, None] + np.arange(4) * 64).astype(np.uint8)
    assert_same_bits(decode(raw, "NVFP4"), by_gguf_py(raw, "NVFP4"))


def test_every_exponent_of_mxfp4_decodes_as_in_gguf_py() -> None:
    raw = np.random.default_rng(13).integers(0, 256, (256, 17), dtype=np.uint8)
    raw[:, 0] = np.arange(256)
    assert_same_bits(decode(raw, "MXFP4"), by_gguf_py(raw, "MXFP4"))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"])
def test_blocks_of_real_ranges_decode_as_in_gguf_py(name: str) -> None:
    weights = (np.random.default_rng(14).standard_t(5, (64, 512)) * 0.03).astype(np.float32)
    raw = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name])
    assert_same_bits(decode(raw, name), by_gguf_py(raw, name))


@pytest.mark.parametrize(
    ("name", "dtype"), [("F64", "<f8"), ("I8", "i1"), ("I16", "<i2"), ("I32", "<i4"), ("I64", "<i8")]
)
def test_number_types_decode_to_the_nearest_float32(name: str, dtype: str) -> None:
    raw = np.random.default_rng(15).integers(0, 256, 8 * 500, dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = raw.view(dtype).astype(np.float32)
    assert_same_bits(decode(raw, name), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_arrays_and_unaligned_memory_decode_equally(name: str) -> None:
    size = 3 * FORMATS[name].block_bytes
    memory = np.random.default_rng(16).integers(0, 256, size + 1, dtype=np.uint8)
    aligned = memory[1:].copy()
    expected = decode(aligned, name)
    assert_same_bits(decode(memory[1:], name), expected)
    assert_same_bits(decode(aligned.tobytes(), name), expected)
    assert_same_bits(decode(aligned.reshape(3, -1), name), expected)


def test_a_long_tensor_decodes_as_its_blocks_do() -> None:
    raw = np.random.default_rng(17).integers(0, 256, (3001, 144), dtype=np.uint8)
    assert_same_bits(decode(raw, "Q4_K"), np.concatenate([decode(block, "Q4_K") for block in raw]))


def test_empty_input_decodes_to_an_empty_array() -> None:
    assert decode(b"", "Q6_K").shape == (0,)


def test_a_part_of_a_block_quotes_the_bytes_seen_and_the_block() -> None:
    with pytest.raises(FormatError, match=r"100 bytes are not a multiple of the Q4_K block \(144 bytes\)"):
        decode(bytes(100), "Q4_K")


def test_decoding_uses_little_more_memory_than_its_result() -> None:
    raw = np.zeros(144 * 16384, np.uint8)
    tracemalloc.start()
    weights = decode(raw, "Q4_K")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < weights.nbytes + (4 << 20)
