"""Model sizes from a file's metadata and tensor index; no weights are read.

An architecture that edgeinfer doesn't run is described by its tensors, if it is built of grouped-query
attention with a dense feed-forward or with experts under the usual names.
"""

from typing import Any

import numpy as np

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.config import ModelConfig
from edgeinfer.model_config.experts_config import MAX_LAYERS
from edgeinfer.model_config.weights import FileTensors, embedding_rows, read_decoder, read_weights
from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.blocks.common.block import BlockSpec, NormSpec
from edgeinfer_kernels.blocks.feed_forward import FeedForwardSpec
from edgeinfer_kernels.blocks.moe import MoeSpec
from edgeinfer_kernels.decoder import DecoderSpec, LayerSpec, ResidualBlock
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_quant_formats import GGUFFile
from edgeinfer_quant_formats.errors import printable

_NORM = NormSpec("rms", 1e-5)


def file_sizes(file: GGUFFile, config: ModelConfig | None) -> ModelSizes:
    """The sizes of the file's model; `config` None: unsupported architecture, generic keys are read.

    Raises:
        UnsupportedModelError: no language model, or one with other components.
    """
    if config is not None:
        return ModelSizes.of(config.specification(), read_weights(file, config, shapes_only=True))
    reader = _GenericReader(file)
    spec = reader.spec()
    return ModelSizes.of(spec, read_decoder(reader, spec))


class _GenericReader(FileTensors):
    """The specification of a model of any architecture, as far as its sizes need it."""

    def __init__(self, file: GGUFFile) -> None:
        self._architecture = printable(file.metadata.get("general.architecture", "(none)"))
        super().__init__(file, self._architecture, shapes_only=True)

    def missing(self, name: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{name} is missing: {self._architecture} isn't built of attention and feed-forwards that a plan "
            "knows"
        )

    def matrix(self, name: str, shape: tuple[int, ...]) -> Matrix | None:
        """As `FileTensors.matrix`; gate and up of experts may be one tensor."""
        tensor = super().matrix(name, shape)
        fused = name.replace("ffn_up_exps", "ffn_gate_up_exps").replace("ffn_gate_exps", "ffn_gate_up_exps")
        if tensor is None and len(shape) == 3 and fused in self.file.tensors:
            count, rows, columns = shape
            both = super().matrix(fused, (count, 2 * rows, columns))
            assert both is not None
            return Matrix(fused, both.format, rows, columns, both.raw[: count * rows], count)
        return tensor

    def spec(self) -> DecoderSpec:
        count = self._count("block_count")
        if not 1 <= count <= MAX_LAYERS:
            raise self._wrong("block_count", count, f"1 to {MAX_LAYERS}")
        vocabulary = embedding_rows(self.file)
        width = self.file.tensors["token_embd.weight"].shape[1]
        layers = tuple(self._layer(index, width) for index in range(count))
        return DecoderSpec(width, vocabulary, layers, _NORM)

    def _wrong(self, key: str, seen: object, expected: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._architecture}.{key}: {printable(str(seen))}, wanted {expected}")

    def _count(self, key: str, layer: int = 0, default: int | None = None) -> int:
        """An integer, or the layer's entry of an array."""
        value: Any = self.file.metadata.get(f"{self._architecture}.{key}", default)
        if isinstance(value, np.ndarray) and layer < len(value):
            value = value[layer].item()
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(key, "missing" if value is None else value, "a whole number")
        return value

    def _shape(self, layer: int, name: str) -> tuple[int, ...] | None:
        info = self.file.tensors.get(f"blk.{layer}.{name}")
        return None if info is None else info.shape

    def _layer(self, layer: int, width: int) -> LayerSpec:
        attention = self._attention(layer, width)
        is_moe = self._shape(layer, "ffn_gate_inp.weight") is not None
        second = self._moe(layer) if is_moe else self._feed_forward(layer)
        return LayerSpec(
            (
                self._residual(layer, attention, "attn_norm", "post_attention_norm"),
                self._residual(layer, second, "ffn_norm", "post_ffw_norm"),
            )
        )

    def _residual(self, layer: int, block: BlockSpec, norm: str, post_norm: str) -> ResidualBlock[BlockSpec]:
        before, after = (name if self._shape(layer, f"{name}.weight") else "" for name in (norm, post_norm))
        return ResidualBlock(block, _NORM, before, after)

    def _attention(self, layer: int, width: int) -> AttentionSpec:
        heads = self._count("attention.head_count", layer)
        if not heads:
            raise self._wrong("attention.head_count", heads, "heads in every layer")
        kv_heads = self._count("attention.head_count_kv", layer, heads) or heads
        head_dim = self._count("attention.key_length", layer, width // heads)
        q_norm = self._shape(layer, "attn_q_norm.weight")
        return AttentionSpec(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=1.0,
            norm=_NORM,
            rope=None,
            qk_norm="none" if q_norm is None else "head" if q_norm == (head_dim,) else "row",
            sinks=self._shape(layer, "attn_sinks.weight") is not None,
        )

    def _feed_forward(self, layer: int) -> FeedForwardSpec:
        down, up = self._shape(layer, "ffn_down.weight"), self._shape(layer, "ffn_up.weight")
        if down is None or up is None:
            raise self.missing(f"blk.{layer}.ffn_{'down' if down is None else 'up'}.weight")
        gated = self._shape(layer, "ffn_gate.weight") is not None or up[0] == 2 * down[-1]
        return FeedForwardSpec("silu", down[-1], gated)

    def _moe(self, layer: int) -> MoeSpec:
        name = f"blk.{layer}.ffn_down_exps.weight"
        down = self._shape(layer, "ffn_down_exps.weight")
        if down is None:
            raise self.missing(name)
        if len(down) != 3:
            raise UnsupportedModelError(f"{name}: shape {down}, wanted experts, rows and columns")
        count, experts_per_token = self._count("expert_count"), self._count("expert_used_count")
        if not 1 <= experts_per_token <= count or down[0] != count:
            raise self._wrong("expert_count", count, f"that of {name}, of which {experts_per_token} are used")
        shared = self._shape(layer, "ffn_up_shexp.weight")
        return MoeSpec(
            activation="silu",
            experts=count,
            experts_per_token=experts_per_token,
            neurons=down[2],
            gating="softmax",
            normalized=True,
            shared_neurons=shared[0] if shared else 0,
            shared_gate=self._shape(layer, "ffn_gate_inp_shexp.weight") is not None,
            selection_bias=self._shape(layer, "exp_probs_b.bias") is not None,
        )
