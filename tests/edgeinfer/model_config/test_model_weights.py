"""A file has every tensor, of the right shape, and no others."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer_kernels.blocks.attention import AttentionWeights
from edgeinfer_kernels.blocks.feed_forward import FeedForwardWeights
from edgeinfer_kernels.decoder import DecoderWeights
from edgeinfer_quant_formats import GGUFFile
from tests.model_zoo import ZOO
from tests.random_models import VOCABULARY, RandomModel


@dataclass(frozen=True)
class Altered(RandomModel):
    """A random model with changed tensors: name -> other shape, None: omitted."""

    altered: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        both = {**super().tensors(), **self.altered}
        return {name: shape for name, shape in both.items() if shape is not None}


class GateOfOtherType(RandomModel):
    """A random model whose gates of attention take the next format."""

    def is_gate(self, name: str) -> bool:
        return False


def weights_of(path: Path) -> DecoderWeights:
    with GGUFFile.open(path) as file:
        config = read_config(file)
        return read_weights(file, config)


def refusal(path: Path, model: RandomModel) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        weights_of(model.write(path / "model.gguf"))
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["blk.1.attn_q.weight", "blk.2.ffn_gate.weight", "blk.0.attn_norm.weight", "output_norm.weight"],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    text = refusal(tmp_path, Altered("llama", altered={name: None}))
    assert text == f"{name} is missing: architecture llama needs it"


def test_a_file_without_an_embedding_holds_no_language_model(tmp_path: Path) -> None:
    text = refusal(tmp_path, Altered("llama", altered={"token_embd.weight": None}))
    assert text == "model.gguf: token_embd.weight is missing; this file is no language model"
    text = refusal(tmp_path, Altered("llama", altered={"token_embd.weight": (64,)}))
    assert text == "model.gguf: token_embd.weight has shape (64,); this file is no language model"


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("blk.0.attn_q.weight", (64, 32), "(64, 64)"),
        ("blk.2.ffn_down.weight", (96, 64), "(64, 96)"),
        ("blk.1.ffn_norm.weight", (63,), "(64,)"),
        ("blk.1.attn_k.bias", (64,), "(32,)"),
        ("output.weight", (VOCABULARY - 1, 64), f"({VOCABULARY}, 64)"),
    ],
)
def test_a_tensor_of_the_wrong_shape_is_quoted(
    tmp_path: Path, name: str, shape: tuple[int, ...], expected: str
) -> None:
    text = refusal(tmp_path, Altered("llama", altered={name: shape}))
    assert text == f"{name}: shape {shape}, wanted {expected}"


def test_unused_tensors_are_refused_with_the_alternative_engine(tmp_path: Path) -> None:
    extra: dict[str, tuple[int, ...]] = {f"blk.{layer}.attn_sub_norm.weight": (64,) for layer in range(3)}
    extra |= {"blk.0.ffn_gate_exps.weight": (96, 64), "v.patch.weight": (4, 4)}
    text = refusal(tmp_path, Altered("llama", altered=extra))
    assert text.startswith("architecture llama doesn't use blk.0.attn_sub_norm.weight, ")
    assert "and 2 more" in text
    assert "engine='llama.cpp'" in text


def test_a_fused_projection_equals_its_three_parts(tmp_path: Path) -> None:
    attention = weights_of(ZOO["phi3"].write(tmp_path / "model.gguf")).layers[0].block_of(AttentionWeights)
    assert (attention.attn_q.rows, attention.attn_k.rows, attention.attn_v.rows) == (64, 32, 32)
    with GGUFFile.open(tmp_path / "model.gguf") as file:
        fused = file.decode("blk.0.attn_qkv.weight")
    parts = [attention.attn_q.decoded(), attention.attn_k.decoded(), attention.attn_v.decoded()]
    assert np.array_equal(np.concatenate(parts), fused)


def test_a_fused_gate_precedes_the_rows_of_up(tmp_path: Path) -> None:
    feed_forward = (
        weights_of(ZOO["phi3"].write(tmp_path / "model.gguf")).layers[0].block_of(FeedForwardWeights)
    )
    with GGUFFile.open(tmp_path / "model.gguf") as file:
        fused = file.decode("blk.0.ffn_up.weight")
    assert feed_forward.ffn_gate is not None
    assert np.array_equal(feed_forward.ffn_gate.decoded(), fused[:96])
    assert np.array_equal(feed_forward.ffn_up.decoded(), fused[96:])


def test_a_fused_bias_is_split_like_its_rows(tmp_path: Path) -> None:
    model = Altered("phi3", fused=True, altered={"blk.0.attn_qkv.bias": (128,)})
    attention = weights_of(model.write(tmp_path / "model.gguf")).layers[0].block_of(AttentionWeights)
    biases = (attention.attn_q_bias, attention.attn_k_bias, attention.attn_v_bias)
    assert [None if bias is None else len(bias) for bias in biases] == [64, 32, 32]


def test_a_separate_gate_is_read_after_the_query_of_each_head(tmp_path: Path) -> None:
    model = ZOO["muse-glimmer"]
    path = model.write(tmp_path / "model.gguf")
    q = weights_of(path).layers[0].block_of(AttentionWeights).attn_q
    with GGUFFile.open(path) as file:
        query, gate = (file.decode(f"blk.0.attn_{part}.weight") for part in ("q", "gate"))
    heads = q.decoded().reshape(model.heads, 2, model.head_dim, -1)
    np.testing.assert_array_equal(heads[:, 0].reshape(query.shape), query)
    np.testing.assert_array_equal(heads[:, 1].reshape(gate.shape), gate)


def test_a_gate_of_another_type_is_refused(tmp_path: Path) -> None:
    text = refusal(tmp_path, GateOfOtherType("muse-glimmer", gate_tensors=True, formats=("F32", "F16")))
    assert text == (
        "blk.0.attn_gate.weight: type F32, wanted F16 as blk.0.attn_q.weight; "
        "llama.cpp reads both: add engine='llama.cpp'"
    )


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    weights = weights_of(replace(ZOO["llama"], tied=True).write(tmp_path / "model.gguf"))
    assert weights.output is weights.token_embd


def test_a_format_without_a_kernel_is_an_unsupported_model(tmp_path: Path) -> None:
    path = replace(ZOO["llama"], formats=("F64",)).write(tmp_path / "model.gguf")
    with pytest.raises(
        UnsupportedModelError, match=r"no CPU kernel for F64; convert the file .*llama\.cpp may"
    ):
        edgeinfer.load(path)


def test_more_embedding_rows_than_tokens_are_refused(tmp_path: Path) -> None:
    rows = {"token_embd.weight": (VOCABULARY + 12, 64), "output.weight": (VOCABULARY + 12, 64)}
    path = Altered("llama", altered=rows).write(tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModelError) as caught:
        edgeinfer.load(path)
    assert str(caught.value) == "token_embd.weight: 300 rows, wanted one for each of the 288 tokens"
