"""Builds the structures that the block kernels read from the specification and the weights."""

from typing import NamedTuple

from edgeinfer_kernels.cpu.layout.packed_matrix import (
    Arena,
    bits,
    group_bytes,
    is_float_format,
    kernel_columns,
    kernel_format,
    padded_rows,
    padded_vector,
)
from edgeinfer_kernels.cpu.runtime.abi import (
    ACTIVATION_CODES,
    ATTENTION,
    CACHE_KINDS,
    FEED_FORWARD,
    HEAD,
    INPUT,
    MATRIX,
    NORM,
    TILE_TOKENS,
)
from edgeinfer_kernels.layer_cache import LayerCache, padded
from edgeinfer_kernels.sizes.cpu_workspace import Workspace
from edgeinfer_kernels.specification import (
    AttentionSpecification,
    FeedForwardSpecification,
    NormSpecification,
)
from edgeinfer_kernels.weights import AttentionWeights, DecoderWeights, FeedForwardWeights, Matrix, Vector

NORM_KINDS = {"rms": 1, "layer": 2}
NEVER = 1 << 40
"""More tokens than any step has."""
QK_NORMS = {"none": 0, "head": 1, "row": 2}


class Placed(NamedTuple):
    """A matrix as kernels see it: the addresses of its GEMV kernel, of that kernel's weights, and of the AMX
    kernel or 0; and the bytes of weights per expert.
    """

    kernel: int
    weights: int
    tile_kernel: int = 0
    expert_stride: int = 0


class BlockBuilder:
    """Builds the structures of a decoder with the packed matrices `placed` (keyed by id)."""

    def __init__(
        self,
        arena: Arena,
        workspace: Workspace,
        placed: dict[int, Placed],
        width: int,
    ) -> None:
        self.arena = arena
        self.workspace = workspace
        self._placed = placed
        self.width = width

    def norm(
        self, norm: NormSpecification, width: int, weight: Vector | None, bias: Vector | None = None
    ) -> int:
        """A NORM structure; without a weight of kind 0, which copies its input."""
        return self.arena.fill(
            NORM,
            kind=NORM_KINDS[norm.kind] if weight is not None else 0,
            epsilon=bits(norm.epsilon),
            weight=self.arena.keep(padded_vector(weight)),
            bias=self.arena.keep(padded_vector(bias)),
            width=width,
            padded=padded(width),
        )

    def matrix(self, matrix: Matrix, bias: Vector | None = None) -> int:
        """A MATRIX structure; the bias has a row for each expert."""
        name = kernel_format(matrix)
        placed = self._placed[id(matrix)]
        rows = None if bias is None else padded_rows(bias.reshape(matrix.experts, -1))
        return self.arena.fill(
            MATRIX,
            kernel=placed.kernel,
            tile_kernel=placed.tile_kernel,
            weights=placed.weights,
            group_bytes=group_bytes(matrix),
            rows=matrix.rows,
            columns=kernel_columns(name, matrix.columns),
            quantized=0 if is_float_format(matrix) else 1,
            bias=self.arena.keep(rows),
            expert_stride=placed.expert_stride,
            bias_stride=4 * padded(matrix.rows),
        )

    def input(
        self,
        name: str,
        columns: int,
        readers: list[Matrix],
        strides: tuple[int, int] | None = None,
        keep_floats: bool = True,
    ) -> int:
        """The rows that `readers` are multiplied with: float32 if they are kept, and int8 or tiles if any
        reader needs them.

        `strides`: bytes per row of both, if there are several rows per token.
        """
        floats, float_stride = self.workspace.rows(name) if keep_floats else (0, 0)
        quantized, quantized_stride = 0, 0
        takers = [matrix for matrix in readers if not is_float_format(matrix)]
        if takers:
            quantized, quantized_stride = self.workspace.rows(f"{name}.quantized")
        if strides is not None:
            float_stride, quantized_stride = strides
        tiles = all(self._placed[id(matrix)].tile_kernel for matrix in takers)
        return self.arena.fill(
            INPUT,
            floats=floats,
            float_stride=float_stride,
            quantized=quantized,
            quantized_stride=quantized_stride,
            columns=columns,
            tile_tokens=TILE_TOKENS if tiles else NEVER,
        )

    def scratch(self) -> dict[str, int]:
        return {"scratch": self.workspace.scratch, "scratch_stride": self.workspace.scratch_stride}

    def attention(self, facts: AttentionSpecification, w: AttentionWeights, cache: LayerCache) -> int:
        """An ATTENTION structure on this cache."""
        rows = self.workspace.rows
        padded_head = padded(facts.head_dim)
        projected_q, q_stride = rows("projected_q")
        projected_k, kv_stride = rows("projected_k")
        projected_v, _ = rows("projected_v")
        queries, query_stride = rows("queries")
        projected, projected_stride = rows("projected")
        norm_width = w.attn_q.rows if facts.qk_norm == "row" else facts.head_dim
        kv_norm_width = w.attn_k.rows if facts.qk_norm == "row" else facts.head_dim
        return self.arena.fill(
            ATTENTION,
            heads=facts.heads,
            kv_heads=facts.kv_heads,
            head_dim=facts.head_dim,
            padded_head=padded_head,
            context=cache.positions,
            window=facts.window,
            scale=bits(facts.scale),
            soft_cap=bits(facts.soft_cap),
            rope_dim=facts.rope.dimensions if facts.rope else 0,
            rope_neox=int(facts.rope.halves) if facts.rope else 0,
            qk_norm=QK_NORMS[facts.qk_norm],
            cache_kind=CACHE_KINDS[cache.keys.dtype.name],
            key_cache=self.arena.keep(cache.keys),
            value_cache=self.arena.keep(cache.values),
            key_scales=self.arena.keep(cache.key_scales),
            value_scales=self.arena.keep(cache.value_scales),
            norm=self.norm(facts.norm, self.width, w.attn_norm, w.attn_norm_bias),
            q_matrix=self.matrix(w.attn_q, w.attn_q_bias),
            k_matrix=self.matrix(w.attn_k, w.attn_k_bias),
            v_matrix=self.matrix(w.attn_v, w.attn_v_bias),
            output_matrix=self.matrix(w.attn_output, w.attn_output_bias),
            q_norm=self.norm(facts.norm, norm_width, w.attn_q_norm) if facts.qk_norm != "none" else 0,
            k_norm=self.norm(facts.norm, kv_norm_width, w.attn_k_norm) if facts.qk_norm != "none" else 0,
            post_norm=self.norm(facts.norm, self.width, w.attn_post_norm),
            residual_scale=bits(facts.residual_scale),
            normed=self.input("normed", self.width, [w.attn_q, w.attn_k, w.attn_v]),
            mixed=self.input("mixed", facts.heads * facts.head_dim, [w.attn_output]),
            queries=queries,
            states=self.workspace.states,
            projected_q=projected_q,
            projected_k=projected_k,
            projected_v=projected_v,
            projected=projected,
            q_stride=q_stride,
            kv_stride=kv_stride,
            query_stride=query_stride,
            projected_stride=projected_stride,
            sinks=self.arena.keep(w.attn_sinks),
            **self.scratch(),
        )

    def feed_forward(self, facts: FeedForwardSpecification, w: FeedForwardWeights) -> int:
        """A FEED_FORWARD structure."""
        hidden_width = w.ffn_up.rows
        readers = [w.ffn_up] if w.ffn_gate is None else [w.ffn_up, w.ffn_gate]
        projected, projected_stride = self.workspace.rows("projected")
        gate, _ = self.workspace.rows("gate")
        return self.arena.fill(
            FEED_FORWARD,
            norm=self.norm(facts.norm, self.width, w.ffn_norm, w.ffn_norm_bias),
            gate_matrix=0 if w.ffn_gate is None else self.matrix(w.ffn_gate, w.ffn_gate_bias),
            up_matrix=self.matrix(w.ffn_up, w.ffn_up_bias),
            down_matrix=self.matrix(w.ffn_down, w.ffn_down_bias),
            post_norm=self.norm(facts.norm, self.width, w.ffn_post_norm),
            residual_scale=bits(facts.residual_scale),
            activation=ACTIVATION_CODES[facts.activation],
            normed=self.input("normed", self.width, readers),
            hidden=self.input("hidden", hidden_width, [w.ffn_down]),
            gate=gate,
            projected=projected,
            projected_stride=projected_stride,
            **self.scratch(),
        )

    def head(self, norm: NormSpecification, weights: DecoderWeights) -> int:
        """A HEAD structure; each call sets the address of its logits."""
        return self.arena.fill(
            HEAD,
            norm=self.norm(norm, self.width, weights.output_norm, weights.output_norm_bias),
            matrix=self.matrix(weights.output),
            normed=self.input("normed", self.width, [weights.output]),
            logits_stride=4 * padded(weights.output.rows),
            **self.scratch(),
        )
