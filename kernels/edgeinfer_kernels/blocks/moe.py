"""Mixture of experts (MoE): specification, weights and sizes of one block, which is divisible by experts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from edgeinfer_kernels.blocks.common.block import NormSpec, StatelessSpec, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import ChunkRows, DivisibleSizes, NormLengths, StepShape
from edgeinfer_kernels.blocks.common.moe_weights import MoeWeights
from edgeinfer_kernels.blocks.feed_forward import Activation, FeedForwardSizes, FeedForwardWeights
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.layout.packed_matrix import is_float_format
from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE, quantized_bytes
from edgeinfer_kernels.cuda.weights.plane_formats import ROW_MULTIPLE
from edgeinfer_kernels.matrix import Matrix, MatrixSize, vector_lengths
from edgeinfer_kernels.sizes.cuda_matrices import (
    activation_bytes,
    matrix_bytes,
    padded_rows,
    taken,
    vector_bytes,
)

__all__ = ["MoeSizes", "MoeSpec", "MoeWeights"]
Gating = Literal["softmax", "sigmoid", "softmax_of_selected"]
EXPERT_PRODUCT_BYTES = 48 << 20
"""Bytes of float32 matmul results with several experts at a time; more if one expert alone needs more."""
LATENT_BUFFERS = "latent", "latent.sum"
"""Buffers on the CPU: what the experts read, and the sum of their results."""
MIN_WEIGHT_SUM = 2.0**-14
"""Minimum divisor of the selected experts' weights: the smallest normal float16."""


@dataclass(frozen=True)
class MoeSpec(StatelessSpec):
    """The router selects `experts_per_token` of `experts` for each token.

    With scores s = router(h), the experts with the largest s are selected; ties go to the lower index.
    `gating` defines their weights: softmax(s) over all experts, sigmoid(s), or softmax over the selected
    ones. With `selection_bias` the experts with the largest ranks are selected: softmax(s) or sigmoid(s),
    plus the bias. With `groups` above 1, of equal size, a token's experts are those of `groups_per_token`
    groups, the ones with the largest sum of their two best ranks. If `normalized`, the weights are divided
    by their sum (at least MIN_WEIGHT_SUM); then they are multiplied by `scale`. The result is
    Σ weight · expert(h), plus that of the shared expert of `shared_neurons`, if there is one; with
    `shared_gate` multiplied by sigmoid(gate · h). All are feed-forwards, with a gate if `gated`.

    `shared_activation`: that of the shared expert; None: that of the others.

    `weighted_input`: the weights multiply what the experts read instead of their results:
    Σ expert(weight · h). Kernels multiply the products of h, before biases.

    `pre_attention_router`: the router reads the layer's input without a norm. `latent_size`: the experts read
    latent_down · h of that many elements, and latent_up · Σ weight · expert(…) is their result; 0: there is
    no such projection. The router and the shared expert read h itself.

    `dense_norm`: the shared expert is a dense feed-forward with other norms. With r = norm(x) without
    weights, the experts read h = w₂ ⊙ r, the dense feed-forward w₁ ⊙ r, and the router s ⊙ r / √d. Both
    results are normalized with weights before they are added. The weight of an expert may be multiplied by a
    scale of the file.
    """

    kind: ClassVar[str] = "moe"
    is_divisible: ClassVar[bool] = True

    activation: Activation
    experts: int
    experts_per_token: int
    neurons: int
    gating: Gating
    normalized: bool
    scale: float = 1.0
    pre_attention_router: bool = False
    shared_neurons: int = 0
    shared_gate: bool = False
    gated: bool = True
    selection_bias: bool = False
    latent_size: int = 0
    groups: int = 1
    groups_per_token: int = 1
    dense_norm: NormSpec | None = None
    weighted_input: bool = False
    shared_activation: Activation | None = None

    @property
    def activation_of_shared(self) -> Activation:
        return self.shared_activation or self.activation

    @property
    def is_ranked(self) -> bool:
        """Whether experts are selected by ranks, which are not in the order of the scores."""
        return self.selection_bias or self.groups > 1

    def __post_init__(self) -> None:
        if self.is_ranked and self.gating == "softmax_of_selected":
            raise ValueError("saw softmax of the selected experts and ranks of experts")
        if self.latent_size and (self.shared_gate or self.pre_attention_router):
            raise ValueError("saw a latent projection of experts and a shared gate or a pre-attention router")
        if self.dense_norm and (self.latent_size or self.pre_attention_router or self.shared_gate):
            raise ValueError(
                "saw a dense feed-forward with norms and a latent projection, gate or other router"
            )

    def read(self, tensors: TensorReader) -> MoeWeights:
        count, neurons, latent = self.experts, self.neurons, self.latent_size
        hidden_size, width = tensors.hidden_size, latent or tensors.hidden_size
        gate, up = tensors.expert_pairs("ffn_gate_up_exps", count, neurons, width) or (
            tensors.experts("ffn_gate_exps", count, neurons, width) if self.gated else None,
            tensors.experts("ffn_up_exps", count, neurons, width),
        )
        if self.dense_norm is not None:
            return self._read_with_dense(tensors, up, gate)
        return MoeWeights(
            ffn_gate_inp=tensors.matrix("ffn_gate_inp", count, hidden_size),
            ffn_up_exps=up,
            ffn_down_exps=tensors.experts("ffn_down_exps", count, width, neurons),
            ffn_gate_exps=gate,
            ffn_gate_inp_bias=tensors.vector("ffn_gate_inp.bias", count),
            ffn_up_exps_bias=tensors.vector("ffn_up_exps.bias", count * neurons),
            ffn_down_exps_bias=tensors.vector("ffn_down_exps.bias", count * width),
            ffn_gate_exps_bias=tensors.vector("ffn_gate_exps.bias", count * neurons),
            shared=self._read_shared(tensors) if self.shared_neurons else None,
            ffn_gate_inp_shexp=tensors.required("ffn_gate_inp_shexp.weight", hidden_size)
            if self.shared_gate
            else None,
            exp_probs_b=tensors.required("exp_probs_b.bias", count) if self.selection_bias else None,
            ffn_latent_down=tensors.matrix("ffn_latent_down", latent, hidden_size) if latent else None,
            ffn_latent_up=tensors.matrix("ffn_latent_up", hidden_size, latent) if latent else None,
        )

    def _read_with_dense(self, tensors: TensorReader, up: Matrix, gate: Matrix | None) -> MoeWeights:
        """The weights of experts and of a dense feed-forward. The router's columns and the input of the dense
        feed-forward get factors for what the experts read.
        """
        width, count = tensors.hidden_size, self.experts
        own = tensors.nonzero("pre_ffw_norm_2.weight", width)
        shared_weights = tensors.required("ffn_norm.weight", width)
        scales = tensors.required("ffn_gate_inp.scale", width) / own / np.float32(np.sqrt(width))
        return MoeWeights(
            ffn_gate_inp=tensors.scaled_matrix("ffn_gate_inp", count, scales),
            ffn_up_exps=up,
            ffn_down_exps=tensors.experts("ffn_down_exps", count, width, self.neurons),
            ffn_gate_exps=gate,
            shared=self._read_shared(tensors, ""),
            shared_gain=shared_weights / own,
            shared_input_norm=shared_weights,
            shared_norm=tensors.required("post_ffw_norm_1.weight", width),
            expert_norm=tensors.required("post_ffw_norm_2.weight", width),
            expert_scales=tensors.vector("ffn_down_exps.scale", count),
        )

    def _read_shared(self, tensors: TensorReader, suffix: str = "_shexp") -> FeedForwardWeights:
        width, neurons = tensors.hidden_size, self.shared_neurons
        return FeedForwardWeights(
            ffn_up=tensors.matrix(f"ffn_up{suffix}", neurons, width),
            ffn_down=tensors.matrix(f"ffn_down{suffix}", width, neurons),
            ffn_gate=tensors.matrix(f"ffn_gate{suffix}", neurons, width) if self.gated else None,
        )

    def sizes(self, weights: MoeWeights, norms: NormLengths) -> "MoeSizes":
        w, count = weights, self.experts
        up, down = MatrixSize.of(w.ffn_up_exps), MatrixSize.of(w.ffn_down_exps)
        gate = None if w.ffn_gate_exps is None else MatrixSize.of(w.ffn_gate_exps)
        biases = vector_lengths(w.ffn_gate_exps_bias, w.ffn_up_exps_bias, w.ffn_down_exps_bias)
        return MoeSizes(
            self,
            FeedForwardSizes(up, down, gate, tuple(length // count for length in biases)),
            MatrixSize.of(w.ffn_gate_inp),
            FeedForwardSizes.of(w.shared) if w.shared else None,
            w.ffn_gate_inp_bias is not None,
            norms.vectors,
            tuple(map(MatrixSize.of, w.latents())),
            vector_lengths(w.shared_input_norm, w.shared_norm, w.expert_norm, w.expert_scales),
            norms.has_post_norm,
        )


@dataclass(frozen=True)
class MoeSizes(DivisibleSizes):
    """The sizes of an MoE block with experts of equal size. `expert.vectors`: bias lengths of one expert;
    `vectors`: of the norms around the block. `latents`: the latent projection and the one back, or nothing.
    `result_vectors`: of the norms of a dense feed-forward and of the experts' sum, and the experts' factors.
    `post_normed`: a norm follows the whole sum.
    """

    granules_label: ClassVar[str] = "experts"
    granule_name: ClassVar[str] = ""
    is_routed: ClassVar[bool] = True

    spec: MoeSpec
    expert: FeedForwardSizes
    router: MatrixSize
    shared: FeedForwardSizes | None = None
    router_biased: bool = False
    vectors: tuple[int, ...] = ()
    latents: tuple[MatrixSize, ...] = ()
    result_vectors: tuple[int, ...] = ()
    post_normed: bool = False

    @property
    def label(self) -> str:  # type: ignore[override]
        """The name of the undivided part."""
        return "router and shared expert" if self.shared else "router"

    def replicated(self) -> list[MatrixSize]:
        return list(self.latents)

    @property
    def granules(self) -> int:
        return self.spec.experts

    @property
    def granules_per_token(self) -> int:
        return self.spec.experts_per_token

    def undivided_vectors(self) -> tuple[int, ...]:
        return self.vectors

    def granule_counts(self) -> list[int]:
        return list(range(self.granules + 1))

    def matrices(self) -> Iterator[MatrixSize]:
        yield from self.undivided()
        yield from self.expert.granule_matrices() * self.granules

    def undivided(self) -> list[MatrixSize]:
        return [self.router, *(self.shared.granule_matrices() if self.shared else ()), *self.latents]

    def routers(self) -> list[MatrixSize]:
        """The router, and the gate row of the shared expert."""
        gate = MatrixSize("ffn_gate_inp_shexp", "F32", 1, self.router.columns)
        return [self.router, *([gate] if self.spec.shared_gate else [])]

    def undivided_device_bytes(self) -> int:
        """The routers in planes and as floats, the slot of each expert, and the shared expert."""
        routers = sum(matrix_bytes(router) + taken(router.weights, 4) for router in self.routers())
        bias = taken(padded_rows(self.granules), 4) if self.router_biased else 0
        bias += taken(self.granules, 4) if self.spec.selection_bias else 0
        slots = taken(2 * self.granules, 4) + sum(map(matrix_bytes, self.latents))
        slots += vector_bytes(self.result_vectors)
        return routers + slots + bias + (self.shared.granules_device_bytes() if self.shared else 0)

    def granule_matrices(self) -> list[MatrixSize]:
        return self.expert.granule_matrices()

    def granules_device_bytes(self) -> int:
        return self.expert.granules_device_bytes()

    @property
    def expert_stack(self) -> FeedForwardSizes:
        """All experts as one feed-forward, with stacked rows."""
        one, count = self.expert, self.granules

        def stacked(matrix: MatrixSize) -> MatrixSize:
            return replace(matrix, rows=count * matrix.rows)

        return FeedForwardSizes(stacked(one.up), stacked(one.down), one.gate and stacked(one.gate))

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        experts_per_token, neurons = self.granules_per_token, self.expert.neurons
        rows, width = assignment_rows(experts_per_token), self.spec.latent_size or self.router.columns
        buffers = {
            "expert.scores": 4 * padded(self.granules),
            "expert.ids": 8 * experts_per_token,
            "expert.weights": 4 * experts_per_token,
            "expert.assignment_rows": 8 * experts_per_token,
            "expert.entries": 8 * experts_per_token,
            "expert.active": 8 + 24 * experts_per_token,
            "expert.gathered.quantized": rows * lines(quantized_bytes(padded(width))),
            "expert.hidden": rows * lines(4 * padded(neurons)),
            "expert.hidden.quantized": rows * lines(quantized_bytes(padded(neurons))),
            "expert.gate": rows * lines(4 * padded(neurons)),
            "expert.out": rows * lines(4 * padded(width)),
        }
        if self.spec.is_ranked:
            buffers["expert.selection"] = 4 * padded(self.granules)
        if any(is_float_format(matrix) for matrix in self.expert.inputs()):
            buffers["expert.gathered"] = rows * lines(4 * padded(width))
        if self.spec.pre_attention_router:
            buffers["router"] = 4 * padded(width)
            buffers["router.quantized"] = quantized_bytes(padded(width))
        if self.latents:
            buffers |= {name: 4 * padded(width) for name in LATENT_BUFFERS}
            buffers |= {f"{name}.quantized": quantized_bytes(padded(width)) for name in LATENT_BUFFERS}
        if self.latents or self.post_normed or self.spec.dense_norm:
            buffers["expert.sum"] = 4 * padded(hidden_size)
        if self.spec.dense_norm:
            buffers["shared.normed"] = 4 * padded(hidden_size)
            buffers["shared.normed.quantized"] = quantized_bytes(padded(hidden_size))
        return buffers | (self.shared.cpu_buffers(hidden_size) if self.shared else {})

    def inputs(self) -> list[MatrixSize]:
        """With those of the experts, even if these read a latent projection."""
        shared = self.shared.inputs() if self.shared else []
        return [*self.expert_stack.inputs(), *shared, *self.routers(), *self.latents[:1]]

    def outputs(self) -> list[MatrixSize]:
        return [self.expert_stack.down, *([self.shared.down] if self.shared else []), *self.latents[1:]]

    @classmethod
    def step_bytes(cls, blocks: Sequence["MoeSizes"], step: StepShape) -> int:
        tokens, experts_per_token = step.tokens, max(block.granules_per_token for block in blocks)
        shared = max((block.shared.neurons for block in blocks if block.shared), default=0)
        experts = max(block.expert.neurons for block in blocks)
        hidden = activation_bytes(tokens, shared, step.hidden_floats)
        hidden += activation_bytes(tokens, experts, step.hidden_floats, experts_per_token)
        has_dense = any(block.spec.dense_norm for block in blocks)
        if has_dense or any(block.spec.pre_attention_router for block in blocks):
            hidden += activation_bytes(tokens, step.hidden_size, step.input_floats)
        latent = max(block.spec.latent_size for block in blocks)
        hidden += activation_bytes(tokens, latent, step.input_floats)
        hidden += activation_bytes(tokens, latent, step.hidden_floats)
        floats = padded_rows(latent), padded_rows(step.hidden_size) if latent or has_dense else 0
        return hidden + sum(taken(tokens * each, 4) for each in floats) + cls._routing_bytes(blocks, tokens)

    @staticmethod
    def _routing_bytes(blocks: Sequence["MoeSizes"], tokens: int) -> int:
        """Bytes of the scores, expert ids and weights of a step's or chunk's tokens."""
        experts_per_token, experts = (
            max(block.granules_per_token for block in blocks),
            max(block.granules for block in blocks),
        )
        words = (padded_rows(experts), experts_per_token, experts_per_token, ROW_MULTIPLE)
        return sum(taken(tokens * each, 4) for each in words)

    @classmethod
    def prompt_bytes(cls, blocks: Sequence["MoeSizes"], chunk: int, hidden_size: int) -> int:
        experts_per_token = max(block.granules_per_token for block in blocks)
        rows = max(block.together(chunk, hidden_size) for block in blocks)
        floats = [chunk * hidden_size] * 2 + [rows, 4 * chunk * experts_per_token]
        floats.append(2 * max(block.granules for block in blocks))
        latent = max(block.spec.latent_size for block in blocks)
        dense = chunk * any(block.spec.dense_norm for block in blocks)
        floats += [chunk * latent, chunk if latent else 0, dense]
        f16 = taken(chunk * latent, 2) + taken(dense * hidden_size, 2)
        return f16 + sum(taken(count, 4) for count in floats) + cls._routing_bytes(blocks, chunk)

    def chunk_rows(self, chunk: int, hidden_size: int) -> ChunkRows:
        rows, neurons = self.together(chunk, hidden_size), self.expert.neurons
        shared = self.shared.chunk_rows(chunk, hidden_size) if self.shared else ChunkRows()
        return ChunkRows(
            hidden=max(rows * neurons, shared.hidden),
            scales=max(rows, shared.scales),
            products=max(rows * max(2 * neurons, hidden_size), shared.products),
        )

    def together(self, chunk: int, hidden_size: int) -> int:
        """Maximum number of token-expert assignments that a prompt computes together on a GPU: `chunk` or
        more.
        """
        fitting = EXPERT_PRODUCT_BYTES // (4 * max(2 * self.expert.neurons, hidden_size))
        return max(min(fitting, chunk * self.granules_per_token), chunk)

    def streamed_vector_bytes(self) -> int:
        return vector_bytes(self.vectors) + self.granules * self.expert.streamed_vector_bytes()


def assignment_rows(experts_per_token: int) -> int:
    """Rows per token of the expert activations on the CPU: one for each expert, plus the padding of partial
    tiles; an expert with fewer than TILE_TOKENS tokens has no padding.
    """
    return (3 * experts_per_token + 1) // 2


def lines(nbytes: int) -> int:
    """Bytes rounded up to whole cache lines."""
    return -(-nbytes // CACHE_LINE) * CACHE_LINE
