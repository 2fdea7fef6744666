"""The weights of an MoE block."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from edgeinfer_kernels.blocks.common.block import BlockWeights
from edgeinfer_kernels.blocks.feed_forward import FeedForwardWeights
from edgeinfer_kernels.matrix import Matrix, Vector


@dataclass(frozen=True)
class MoeWeights(BlockWeights):
    """The weights of an MoE block, by GGUF name; the biases of the experts are concatenated.

    `shared` is a feed-forward that is applied to every token. Its result is multiplied by
    sigmoid(ffn_gate_inp_shexp · h) if that vector exists. exp_probs_b (experts,): the bias of the selection.
    ffn_latent_down, ffn_latent_up: the latent projection; each device with experts has it.
    The shared expert reads h ⊙ shared_gain, the norm of x with the weights shared_input_norm; shared_norm,
    expert_norm: the weights of the norms of its result and of the experts' sum. expert_scales (experts,):
    factors of the experts' weights.
    """

    kind: ClassVar[str] = "moe"

    ffn_gate_inp: Matrix
    ffn_up_exps: Matrix
    ffn_down_exps: Matrix
    ffn_gate_exps: Matrix | None
    ffn_gate_inp_bias: Vector | None = None
    ffn_up_exps_bias: Vector | None = None
    ffn_down_exps_bias: Vector | None = None
    ffn_gate_exps_bias: Vector | None = None
    shared: FeedForwardWeights | None = None
    ffn_gate_inp_shexp: Vector | None = None
    exp_probs_b: Vector | None = None
    ffn_latent_down: Matrix | None = None
    ffn_latent_up: Matrix | None = None
    shared_gain: Vector | None = None
    shared_input_norm: Vector | None = None
    shared_norm: Vector | None = None
    expert_norm: Vector | None = None
    expert_scales: Vector | None = None

    def expert(self, index: int) -> FeedForwardWeights:
        """One expert as a feed-forward."""

        def bias(stack: Matrix, biases: Vector | None) -> Vector | None:
            return None if biases is None else biases[index * stack.rows : (index + 1) * stack.rows]

        return FeedForwardWeights(
            ffn_up=self.ffn_up_exps.expert(index),
            ffn_down=self.ffn_down_exps.expert(index),
            ffn_gate=None if self.ffn_gate_exps is None else self.ffn_gate_exps.expert(index),
            ffn_gate_bias=bias(self.ffn_up_exps, self.ffn_gate_exps_bias),
            ffn_up_bias=bias(self.ffn_up_exps, self.ffn_up_exps_bias),
            ffn_down_bias=bias(self.ffn_down_exps, self.ffn_down_exps_bias),
        )

    def of_experts(self, numbers: Sequence[int]) -> "MoeWeights":
        """The block with only these experts, in this order; the router still selects from all."""

        def part(stack: Matrix, biases: Vector | None) -> Vector | None:
            return None if biases is None else biases.reshape(-1, stack.rows)[list(numbers)].reshape(-1)

        return replace(
            self,
            ffn_up_exps=self.ffn_up_exps.take_experts(numbers),
            ffn_down_exps=self.ffn_down_exps.take_experts(numbers),
            ffn_gate_exps=None if self.ffn_gate_exps is None else self.ffn_gate_exps.take_experts(numbers),
            ffn_gate_exps_bias=part(self.ffn_up_exps, self.ffn_gate_exps_bias),
            ffn_up_exps_bias=part(self.ffn_up_exps, self.ffn_up_exps_bias),
            ffn_down_exps_bias=part(self.ffn_down_exps, self.ffn_down_exps_bias),
        )

    def granule_matrices(self) -> list[Matrix]:
        return [*self.stacks(), *self.latents()]

    def latents(self) -> list[Matrix]:
        """The latent projection and the one back; none if there is none."""
        return [each for each in (self.ffn_latent_down, self.ffn_latent_up) if each is not None]

    def stacks(self) -> list[Matrix]:
        """The stacked matrices of the experts: up, down, and gate if there is one."""
        return [
            self.ffn_up_exps,
            self.ffn_down_exps,
            *([] if self.ffn_gate_exps is None else [self.ffn_gate_exps]),
        ]

    def every_token(self) -> list[Matrix]:
        """The matrices that each token is multiplied with: router, shared expert and latent projection."""
        shared = [] if self.shared is None else self.shared.matrices()
        return [self.ffn_gate_inp, *shared, *self.latents()]

    def matrices(self) -> list[Matrix]:
        return [*self.stacks(), *self.every_token()]
