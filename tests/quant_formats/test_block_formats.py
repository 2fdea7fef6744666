"""Block formats: sizes, look-up by name and number, and rows that don't fill whole blocks."""

import gguf
import pytest

from edgeinfer_quant_formats import FORMATS, FormatError, block_format


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "Q2_0"])  # which gguf-py lacks
def test_sizes_and_type_numbers_equal_gguf_py(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    spec = FORMATS[name]
    assert (spec.name, spec.type_id, spec.block_elements, spec.block_bytes) == (name, kind, elements, nbytes)


def test_a_format_is_found_by_name_and_number() -> None:
    kind = FORMATS["Q4_K"]
    assert block_format("Q4_K") is block_format("q4_k") is block_format(12) is block_format(kind) is kind


def test_every_type_of_gguf_py_that_is_not_supported_is_named() -> None:
    for kind in gguf.GGMLQuantizationType:
        if kind.name in FORMATS:
            continue
        message = rf"type {kind.name} \({int(kind)}\) is not supported; supported: F32, F16"
        with pytest.raises(FormatError, match=message):
            block_format(int(kind))
        with pytest.raises(FormatError, match=rf"format {kind.name} is not supported"):
            block_format(kind.name)


def test_an_unknown_type_is_quoted() -> None:
    with pytest.raises(FormatError, match="type number 77 is unknown; supported: F32"):
        block_format(77)
    with pytest.raises(FormatError, match="format Q9_Z is unknown; supported: F32"):
        block_format("Q9_Z")


def test_bytes_of_rows_and_tensors() -> None:
    kind = block_format("Q4_K")
    assert kind.row_bytes(512) == 288
    assert kind.nbytes((3, 5, 256)) == 3 * 5 * 144
    assert block_format("F16").nbytes((7,)) == 14


def test_a_row_with_a_partial_block_quotes_the_row_and_the_block() -> None:
    with pytest.raises(FormatError, match=r"row of 100 weights is not a multiple of the Q4_K block \(256\)"):
        block_format("Q4_K").row_bytes(100)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (-1, 32)])
def test_a_shape_without_weights_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError, match="wanted at least one dimension, each at least 1"):
        block_format("Q8_0").nbytes(shape)
