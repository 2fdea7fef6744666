"""Encoding: bit for bit as gguf-py where it encodes, no worse than llama.cpp otherwise."""

import json
from functools import cache

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer_quant_formats import FORMATS, FormatError, decode, encode
from edgeinfer_quant_formats.codecs import ENCODERS
from tests.quant_formats import quantizer_errors

Floats = NDArray[np.float32]
ENCODED_BY_GGUF_PY = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"]
BLOCK_FORMATS = [name for name, kind in FORMATS.items() if kind.is_quantized and name in ENCODERS]
SEARCHED = quantizer_errors.FORMATS
ALWAYS_SEARCHED = [name for name in SEARCHED if name not in quantizer_errors.SEARCHED_BY_IMPORTANCE]

# The largest root mean square error on unit gaussians, about 2% above what the searches reach.
ERRORS = {
    "Q4_0": 0.092, "Q4_1": 0.083, "Q5_0": 0.046, "Q5_1": 0.040, "Q8_0": 0.0062, "Q2_K": 0.30,
    "Q3_K": 0.150, "Q4_K": 0.075, "Q5_K": 0.037, "Q6_K": 0.0186, "IQ4_NL": 0.081, "IQ4_XS": 0.081,
    "IQ2_XXS": 0.351, "IQ2_XS": 0.302, "IQ2_S": 0.251, "IQ3_XXS": 0.184, "IQ3_S": 0.134, "IQ1_S": 0.505,
    "IQ1_M": 0.46, "MXFP4": 0.125, "TQ1_0": 0.95, "TQ2_0": 0.95, "Q1_0": 0.62, "Q2_0": 0.75,
}  # fmt: skip


@cache
def arrays() -> dict[str, Floats]:
    random = np.random.default_rng(21)
    made = {
        "gaussian": random.standard_normal((264, 256)),
        "heavy tails": random.standard_t(2, (500, 256)) * 1e-3,
        "tiny": random.standard_normal((100, 256)) * 1e-7,
        "zeros": np.zeros((4, 256)),
        "one": np.ones((4, 256)),
        "minus one": -np.ones((4, 256)),
        "halves between levels": random.integers(-8, 8, (500, 256)) / 2,
        "zeros in rows": np.round(random.standard_normal((300, 256)) * 4) * random.integers(0, 2, (300, 1)),
    }
    return {name: array.astype(np.float32) for name, array in made.items()}


@cache
def encoded_gaussian(name: str) -> NDArray[np.uint8]:
    """Gaussian weights in a format: several tests look at them."""
    return encode(arrays()["gaussian"], name)


@pytest.mark.default_cases(30)
@pytest.mark.parametrize("name", ENCODED_BY_GGUF_PY)
@pytest.mark.parametrize("array", arrays())
def test_blocks_equal_gguf_py(name: str, array: str) -> None:
    weights = arrays()[array]
    with np.errstate(all="ignore"):
        expected = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(
        encode(weights, name), np.ascontiguousarray(expected).view(np.uint8).reshape(-1)
    )


def test_bf16_keeps_infinities_and_quiets_nans_as_gguf_py_does() -> None:
    bits = np.random.default_rng(22).integers(0, 1 << 32, 50_000, dtype=np.uint32)
    bits[:4] = 0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF
    weights = bits.view(np.float32)
    expected = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.BF16)
    np.testing.assert_array_equal(encode(weights, "BF16"), expected.view(np.uint8))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_gaussian_weights_round_trip_within_the_format_error(name: str) -> None:
    seen = quantizer_errors.error(arrays()["gaussian"], encoded_gaussian(name), name)
    assert seen < ERRORS[name]


@pytest.mark.default_cases(10)
@pytest.mark.parametrize("importance", ["plain", "importance"])
@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.parametrize("array", quantizer_errors.ARRAYS)
def test_the_error_is_no_larger_than_in_llama_cpp(name: str, array: str, importance: str) -> None:
    expected = json.loads(quantizer_errors.ERRORS_FILE.read_text(encoding="utf-8"))[array][name][importance]
    weights = quantizer_errors.weights_of(array)
    columns = quantizer_errors.importance_of(weights.shape[1]) if importance == "importance" else None
    seen = quantizer_errors.error(weights, encode(weights, name, columns), name, columns)
    # With a grid, some error is exchanged for weights that are not smaller on average.
    assert seen <= expected * (1.05 if FORMATS[name].grid else 1.02)


@pytest.mark.parametrize("name", quantizer_errors.GRID_FORMATS)
def test_levels_of_a_grid_are_hardly_smaller_than_the_weights_on_average(name: str) -> None:
    weights = arrays()["gaussian"].astype(np.float64).reshape(-1)
    seen = decode(encoded_gaussian(name), name)
    assert (weights * seen).sum() / (weights * weights).sum() == pytest.approx(1, abs=0.06)


@pytest.mark.slow
@pytest.mark.llama_cpp
def test_the_stored_errors_equal_llama_cpp() -> None:
    pytest.importorskip("llama_cpp")
    stored = json.loads(quantizer_errors.ERRORS_FILE.read_text(encoding="utf-8"))
    measured = quantizer_errors.measure_llama_cpp()
    for array, formats in measured.items():
        for name, errors in formats.items():
            assert errors == pytest.approx(stored[array][name], rel=1e-3), (array, name)


@pytest.mark.default_cases(8)
@pytest.mark.parametrize("name", SEARCHED)
def test_importance_moves_the_error_to_less_important_columns(name: str) -> None:
    weights = arrays()["gaussian"]
    importance = np.tile(np.array([100, 1], np.float32), 128)
    plain = (decode(encoded_gaussian(name), name).reshape(weights.shape) - weights) ** 2
    weighted = (decode(encode(weights, name, importance), name).reshape(weights.shape) - weights) ** 2
    assert weighted[:, ::2].mean() < plain[:, ::2].mean()


@pytest.mark.parametrize("name", SEARCHED)
def test_columns_of_zero_importance_are_not_lost(name: str) -> None:
    weights = arrays()["gaussian"][:64]
    importance = np.zeros(256, np.float32)
    importance[:32] = 1
    for columns in (importance, np.zeros(256, np.float32)):
        seen = decode(encode(weights, name, columns), name).reshape(weights.shape)
        assert np.sqrt(((seen - weights) ** 2).mean()) < 3 * ERRORS[name]


@pytest.mark.default_cases(8)
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_encoding_what_was_decoded_changes_little(name: str) -> None:
    once = decode(encoded_gaussian(name), name)
    twice = decode(encode(once, name), name)
    assert np.sqrt(((once - twice) ** 2).mean()) < ERRORS[name] / 2


def test_q1_0_keeps_signs_and_the_mean_magnitude() -> None:
    weights = np.random.default_rng(26).standard_normal((300, 128)).astype(np.float32)
    weights[0] = 0
    total = np.zeros(300, np.float32)
    for column in np.abs(weights).T:
        total += column
    scales = (total / np.float32(128)).astype("<f2").astype(np.float32)
    expected = np.where(weights >= 0, scales[:, None], -scales[:, None])
    np.testing.assert_array_equal(decode(encode(weights, "Q1_0"), "Q1_0").reshape(300, 128), expected)


@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", ["Q1_0", "Q2_0"])
@pytest.mark.parametrize("array", arrays())
def test_blocks_that_gguf_py_lacks_equal_llama_cpp(array: str, name: str) -> None:
    pytest.importorskip("llama_cpp")
    weights = arrays()[array]
    np.testing.assert_array_equal(encode(weights, name), quantizer_errors.by_llama_cpp(weights, name))


def test_a_format_without_an_encoder_is_named() -> None:
    with pytest.raises(FormatError, match="format NVFP4 has no encoder, wanted one of F32, "):
        encode(np.ones(256), "NVFP4")


def test_a_zero_among_large_weights_gets_the_lowest_level_of_a_grid() -> None:
    weights = np.random.default_rng(27).standard_normal(256).astype(np.float32)
    weights[::8] = 0
    for name in quantizer_errors.GRID_FORMATS:
        seen = decode(encode(weights, name), name)
        assert np.abs(seen[::8]).mean() < np.abs(np.delete(seen, np.s_[::8])).mean() / 2, name


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_zeros_encode_to_zeros(name: str) -> None:
    assert not decode(encode(np.zeros(512), name), name).any()


@pytest.mark.default_cases
@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("value", [1.5, -1.5, 1e-3, -3e3])
def test_a_block_of_one_value_is_exact(name: str, value: float) -> None:
    seen = decode(encode(np.full(256, value), name), name)
    tolerance = 0.25 if name == "MXFP4" else 0.02
    np.testing.assert_allclose(seen, value, rtol=tolerance)


@pytest.mark.default_cases
@pytest.mark.parametrize("name", ALWAYS_SEARCHED)
@pytest.mark.parametrize("size", [1e-4, 1e-5])
def test_small_weights_keep_their_precision_below_the_float16_range(name: str, size: float) -> None:
    weights = np.random.default_rng(25).standard_normal((64, 256)).astype(np.float32)
    original = quantizer_errors.error(weights, encode(weights, name), name)
    small = weights * np.float32(size)
    assert quantizer_errors.error(small, encode(small, name), name) / size < 1.3 * original


WITH_ZERO = [name for name, kind in FORMATS.items() if name in BLOCK_FORMATS and not kind.grid]


@pytest.mark.parametrize("name", [name for name in WITH_ZERO if name != "Q1_0"])
def test_one_outlier_among_zeros_is_kept(name: str) -> None:
    weights = np.zeros(256, np.float32)
    weights[77] = -6.0
    seen = decode(encode(weights, name), name)
    assert seen[77] == pytest.approx(-6.0, rel=0.02)
    assert np.abs(np.delete(seen, 77)).max() < 0.06


@pytest.mark.default_cases(8)
@pytest.mark.parametrize("name", SEARCHED)
def test_blocks_do_not_depend_on_their_neighbors(name: str) -> None:
    weights = arrays()["gaussian"]
    whole = encoded_gaussian(name).reshape(len(weights), -1)
    for row in (0, 255, 256, len(weights) - 1):
        np.testing.assert_array_equal(encode(weights[row], name), whole[row])


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "IQ4_XS", "MXFP4"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_non_finite_weights_are_refused_with_their_index(name: str, value: float) -> None:
    weights = np.ones(1 << 17, np.float32)
    weights[70_001] = value
    message = rf"weight 70001 is {value:g}, wanted finite weights of at most 1e\+10 for {name}"
    with pytest.raises(FormatError, match=message.replace("e+", r"e\+")):
        encode(weights, name)


@pytest.mark.parametrize("name", [name for name in BLOCK_FORMATS if name != "MXFP4"])
def test_weights_too_large_for_the_scale_are_refused(name: str) -> None:
    weights = np.random.default_rng(23).standard_normal(256) * 2e9
    with pytest.raises(FormatError, match="does not fit float16, wanted at most 65504"):
        encode(weights, name)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_part_of_a_block_quotes_the_weights_seen_and_the_block(name: str) -> None:
    elements = FORMATS[name].block_elements
    with pytest.raises(
        FormatError, match=rf"100 weights are not a multiple of the {name} block \({elements}\)"
    ):
        encode(np.ones(100), name)


def test_an_importance_that_does_not_fit_is_refused() -> None:
    weights = np.ones((4, 256), np.float32)
    for shape in ((100,), (768,), (4, 256), (0,)):
        with pytest.raises(FormatError, match="wanted one number per column: whole Q4_K blocks"):
            encode(weights, "Q4_K", np.ones(shape))
    with pytest.raises(FormatError, match=r"importance from -1.0 to 1.0, wanted finite and at least 0"):
        encode(weights, "Q4_K", np.linspace(-1, 1, 256))


@pytest.mark.parametrize(("name", "dtype"), [("I8", "i1"), ("I16", "<i2"), ("I32", "<i4"), ("I64", "<i8")])
def test_integers_are_stored_unchanged_or_refused(name: str, dtype: str) -> None:
    limits = np.iinfo(dtype)
    numbers = np.array([limits.min, -1, 0, 1, limits.max])
    np.testing.assert_array_equal(encode(numbers, name).view(dtype), numbers)
    with pytest.raises(FormatError, match=rf"wanted integers of {name} \({limits.min} to {limits.max}\)"):
        encode(np.array([0.5]), name)


def test_f64_and_f32_are_stored_unchanged() -> None:
    numbers = np.random.default_rng(24).standard_normal(100)
    np.testing.assert_array_equal(encode(numbers, "F64").view("<f8"), numbers)
    np.testing.assert_array_equal(encode(numbers, "F32").view("<f4"), numbers.astype(np.float32))
