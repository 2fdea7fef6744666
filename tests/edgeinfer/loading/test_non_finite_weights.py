"""NaN and infinity in a model file: refused while weights are loaded, or an error instead of text."""

from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest

import edgeinfer
from edgeinfer.errors import LogitsError
from edgeinfer_quant_formats import FORMATS, FormatError, GGUFFile
from edgeinfer_quant_formats.formats import ScaleField, non_finite_blocks
from tests.kernels.conftest import best_formats
from tests.random_models import RandomModel

WEIGHT_FORMATS = [name for name, spec in FORMATS.items() if spec.scales]
MATRIX = "blk.0.ffn_down.weight"


def model_file(
    folder: Path, name: str, *, damaged: str = MATRIX, value: str = "nan", number: int = 0
) -> Path:
    """A model with matrices of one format, with a non-finite scale in the tensor's 300th block, or last."""
    model = RandomModel(
        "llama", width=256, layers=1, head_dim=64, feed_forward=256, formats=(name,), biases=("attn_q",)
    )
    path = model.write(Path(mkdtemp(dir=folder), f"{name}.gguf"))
    with GGUFFile.open(path) as file:
        info = file.tensors[damaged]
    damage(
        path,
        info.format.name,
        info.offset,
        min(300, info.nbytes // info.format.block_bytes - 1),
        value,
        number,
    )
    return path


def damage(path: Path, name: str, offset: int, block: int, value: str, number: int) -> None:
    """Replace a scale of a block by NaN or infinity."""
    field, at = scales_of(name), offset + block * FORMATS[name].block_bytes
    bits = field.exponent
    if name != "MXFP4":  # its scales have an exponent only
        sign = 1 << (8 * field.unit - 1) if value == "-inf" else 0
        highest_of_mantissa = (field.exponent & -field.exponent) >> 1
        bits |= highest_of_mantissa if value == "nan" else sign
    content = bytearray(path.read_bytes())
    first = at + field.offset + field.unit * number
    content[first : first + field.unit] = bits.to_bytes(field.unit, "little")
    path.write_bytes(content)


def scales_of(name: str) -> ScaleField:
    field = FORMATS[name].scales
    assert field is not None
    return field


@pytest.mark.default_cases(8)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", best_formats(WEIGHT_FORMATS))
def test_a_non_finite_scale_is_found_while_weights_are_repacked(
    tmp_path: Path, name: str, value: str
) -> None:
    for number in range(scales_of(name).count):
        path = model_file(tmp_path, name, value=value, number=number)
        with GGUFFile.open(path) as file:
            (block,) = non_finite_blocks(file.raw(MATRIX), name)
            row = block // (len(file.raw(MATRIX)[0]) // FORMATS[name].block_bytes)
        with pytest.raises(FormatError) as caught:
            edgeinfer.load(path, device="cpu", threads=1, draft=None)
        assert str(caught.value) == (
            f"{MATRIX}: NaN or infinity in row {row}, wanted finite numbers; the model file is damaged, "
            "download it again"
        )


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("name", best_formats(WEIGHT_FORMATS))
def test_a_non_finite_memory_mapped_scale_ends_generation(tmp_path: Path, name: str) -> None:
    for value in ("nan", "inf"):
        path = model_file(tmp_path, name, value=value)
        with (
            edgeinfer.load(path, device="cpu", threads=1, draft=None, repack=False) as model,
            pytest.raises(LogitsError, match="logits: saw "),
        ):
            model.generate("the", max_tokens=4)


@pytest.mark.parametrize("name", ["Q8_0", "F16", "F32"])
@pytest.mark.parametrize("repack", [True, False])
def test_a_non_finite_embedding_ends_generation(tmp_path: Path, name: str, repack: bool) -> None:
    path = model_file(tmp_path, name, damaged="token_embd.weight")
    with GGUFFile.open(path) as file:
        block = int(non_finite_blocks(file.raw("token_embd.weight"), name)[0])
    token = block * FORMATS[name].block_elements // 256
    with (
        edgeinfer.load(path, device="cpu", threads=1, draft=None, repack=repack) as model,
        pytest.raises(LogitsError, match="logits: saw NaN"),
    ):
        model.generate([1, token, 5, 6], max_tokens=4)


@pytest.mark.parametrize("tensor", ["blk.0.attn_norm.weight", "output_norm.weight", "blk.0.attn_q.bias"])
def test_a_non_finite_vector_is_refused(tmp_path: Path, tensor: str) -> None:
    path = model_file(tmp_path, "F32", damaged=tensor)
    with pytest.raises(
        FormatError, match=f"^{tensor}: NaN or infinity in element 255, wanted finite numbers"
    ):
        edgeinfer.load(path, device="cpu", threads=1, draft=None)


def test_padding_of_the_last_group_is_not_checked(tmp_path: Path) -> None:
    path = RandomModel("llama", layers=1, feed_forward=72).write(tmp_path / "odd.gguf")
    with edgeinfer.load(path, device="cpu", threads=1, draft=None) as model:
        assert np.isfinite(model.engine.append([1])).all()
