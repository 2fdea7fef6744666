"""A decoder as its formula in numpy: slow and simple, the reference of every kernel test.

Weights are dequantized to float when needed and not rounded again. With `dtype` float64 the result is exact
for testing purposes; the KV cache is then float64 too unless a cache type is given.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import BatchPositions
from edgeinfer_kernels.blocks.embedding.assistant_input import AssistantInputSpec
from edgeinfer_kernels.blocks.embedding.draft_input import STATES
from edgeinfer_kernels.blocks.embedding.eagle_input import OWN_STATES, EagleInputSpec
from edgeinfer_kernels.blocks.embedding.medusa_head import LOGITS
from edgeinfer_kernels.blocks.encoder_attention import CPU_TEXT_TOKENS, TEXT_BOUNDS, text_bounds
from edgeinfer_kernels.caches.state_rows import StateRows
from edgeinfer_kernels.capabilities import Capabilities
from edgeinfer_kernels.decoder import BlockIndex, DecoderSpec, DecoderWeights
from edgeinfer_kernels.decoder_state import DecoderState, Routing, StatePool
from edgeinfer_kernels.main_memory import MainMemoryBackend
from edgeinfer_kernels.recurrent_state import RecurrentStep
from edgeinfer_kernels.reference.blocks import forward_of
from edgeinfer_kernels.reference.blocks.layer_output import PER_LAYER_ROWS
from edgeinfer_kernels.reference.step import Array, BlockStep, Observer, normalize, soft_cap


def final_norm(spec: DecoderSpec, weights: DecoderWeights, x: Array) -> Array:
    """The norm before the head."""
    return normalize(x, spec.norm, weights.output_norm, weights.output_norm_bias)


def add_position_rows(weights: DecoderWeights, x: Array, bounds: npt.NDArray[np.int64]) -> None:
    """Add the learned rows of their positions to the embeddings x of texts with these `text_bounds`."""
    if weights.position_rows is not None:
        positions = np.arange(len(x)) - bounds[:, 0]
        x += weights.position_rows[np.minimum(positions, len(weights.position_rows) - 1)]


class ReferenceBackend(MainMemoryBackend[Array]):
    """A decoder in numpy."""

    name = "reference"

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        state: DecoderState,
        dtype: npt.DTypeLike = np.float32,
        routing: Routing | None = None,
    ) -> None:
        if state.recent is not None:
            raise ValueError(
                "saw recent positions in f16, wanted a cache of one type: the CPU backend has them"
            )
        self.spec = spec
        self.weights = weights
        self.state = state
        can = Capabilities(
            max_batch_tokens=64,
            max_tree_tokens=64,
            text_tokens=CPU_TEXT_TOKENS,
            skips_layers=True,
            has_separate_states=True,
            max_joined_tokens=64,
            can_evict=True,
            hands_out_hidden=True,
            is_fork_safe=True,
        )
        self.capabilities = can.limited_to(spec)
        self.dtype = dtype
        self.routing = routing
        self.observer: Observer | None = None
        """Called with the inputs of every matrix of a layer."""
        self._recurrent = RecurrentStep()
        self._pool: list[ReferenceBackend] = []
        self.shared: dict[str, Array] = {}
        """Results of a step for blocks of later layers."""
        self._kept_layers: tuple[int, ...] = ()
        self._kept: dict[int, Array] = {}
        """The hidden states of the last step after each number of layers."""
        self._input: Array = np.empty(0)
        self._normed: Array = np.empty(0)

    def embed(self, ids: Sequence[int]) -> Array:
        rows = self.weights.token_embd.decoded_rows(np.asarray(ids))
        per_layer = self.weights.per_layer_token_embd
        if per_layer is not None:
            self.shared[PER_LAYER_ROWS] = per_layer.decoded_rows(np.asarray(ids)).astype(self.dtype)
        scale = np.asarray(self.spec.embedding_scale, self.dtype)
        return np.asarray(rows.astype(self.dtype) * scale)

    def forward(self, x: Array, start: int) -> None:
        self.forward_layers(x, start, range(len(self.spec.layers)))

    def forward_layers(self, x: Array, start: int, layers: Sequence[int]) -> None:
        self._recurrent = self.state.begin(start, len(x))
        for layer in layers:
            self._keep(layer, x)
            self._layer(layer, x, start, None)
        self._keep(len(self.spec.layers), x)

    def _keep(self, layers: int, x: Array) -> None:
        if layers in self._kept_layers:
            self._kept[layers] = x.copy()

    def keep_hidden(self, layers: Sequence[int]) -> None:
        self._kept_layers = tuple(layers)

    def kept_hidden(self, tokens: int) -> list[Array]:
        return [self._kept[layers][:tokens] for layers in self._kept_layers]

    def set_hidden(self, states: Array | StateRows, start: int) -> None:
        self.shared.pop(OWN_STATES, None)
        self.shared[STATES] = np.asarray(states)

    def set_own_hidden(self, x: Array, start: int) -> None:
        if self.spec.specs(EagleInputSpec):
            self.shared.pop(STATES, None)
            self.shared[OWN_STATES] = x.copy()
        elif self.spec.specs(AssistantInputSpec):
            self.shared[OWN_STATES] = final_norm(self.spec, self.weights, x)
        elif self.spec.has_raw_draft_states:
            self.shared[STATES] = x.copy()
        else:
            self.shared[STATES] = final_norm(self.spec, self.weights, x)

    def medusa_logits(self, states: Array, head: int) -> npt.NDArray[np.float32]:
        self.forward_layers(states.astype(self.dtype), 0, [head])
        return self.shared[LOGITS].astype(np.float32)

    def forward_batch(self, x: Array, positions: BatchPositions) -> None:
        for layer in range(len(self.spec.layers)):
            self._keep(layer, x)
            self._layer(layer, x, 0, positions)
        self._keep(len(self.spec.layers), x)

    def with_state(self, state: DecoderState) -> "ReferenceBackend":
        return ReferenceBackend(self.spec, self.weights, state, self.dtype, self.routing)

    def joined(self, pool: StatePool) -> "ReferenceBackend":
        backend = self.with_state(pool.joined)
        backend._pool = [self.with_state(state) for state in pool.states]
        return backend

    def forward_states(self, x: Array, starts: Sequence[int], states: Sequence[int]) -> None:
        shared = dict(self.shared)
        for row, (start, state) in enumerate(zip(starts, states, strict=True)):
            backend = self._pool[state]
            backend.shared = {name: rows[row : row + 1] for name, rows in shared.items()}
            backend.forward(x[row : row + 1], start)

    def forward_texts(self, x: Array, lengths: Sequence[int]) -> None:
        bounds = text_bounds(np.asarray(lengths, np.int64))
        self.shared[TEXT_BOUNDS] = bounds.astype(np.float64)
        add_position_rows(self.weights, x, bounds)
        self.forward(x, 0)

    def _layer(self, layer: int, x: Array, start: int, batch: BatchPositions | None) -> None:
        layer_input = x.copy()
        for position in range(len(self.spec.layers[layer].blocks)):
            self.run_block(BlockIndex(layer, position), x, start, layer_input, batch)

    def run_block(
        self,
        index: BlockIndex,
        x: Array,
        start: int,
        layer_input: Array | None = None,
        batch: BatchPositions | None = None,
    ) -> None:
        """x += scale · post_norm(block(norm(x))). `layer_input`: x before the layer; None: x. A block that
        shares its input runs after the block before it.
        """
        residual, w = self.spec.residual(index), self.weights.residual(index)
        if not residual.shares_input:
            self._input = x.copy()
        if not residual.shares_input or residual.has_own_norm:
            self._normed = normalize(self._input, residual.norm, w.norm, w.norm_bias).copy()
        step = BlockStep(
            index=index,
            spec=residual.block,
            weights=w.block,
            state=self.state.get(index),
            start=start,
            x=x,
            layer_input=x if layer_input is None else layer_input,
            dtype=self.dtype,
            batch=batch,
            routing=self.routing,
            recurrent=self._recurrent,
            shared=self.shared,
            observer=self.observer,
        )
        y = forward_of(residual.block.kind)(step, self._normed)
        x += normalize(y, residual.post_norm_spec, w.post_norm) * residual.residual_scale

    def final_norm(self, x: Array) -> npt.NDArray[np.float32]:
        return final_norm(self.spec, self.weights, x).astype(np.float32)

    def logits(self, x: Array) -> npt.NDArray[np.float32]:
        h = final_norm(self.spec, self.weights, x)
        raw = np.asarray(h @ self.weights.output.decoded().astype(self.dtype).T)
        bias = self.weights.output_bias
        raw = raw if bias is None else raw + bias
        return soft_cap(raw * self.spec.logit_scale, self.spec.logit_soft_cap)

    def close(self) -> None:
        """Does nothing: no resources are held."""
