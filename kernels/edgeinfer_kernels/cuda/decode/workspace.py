"""The buffers of a decode step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.offload.device_experts import (
    DeviceExperts,
    DeviceFeedForward,
    RoutingSpace,
    expert_facts,
)
from edgeinfer_kernels.cuda.tuning.step_shapes import MAX_SPLITS
from edgeinfer_kernels.cuda.weights.device_model import DeviceModel
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.plane_formats import FLOAT_CODES, padded_blocks
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS, STATE_WORDS, attention_rows, head_dimensions
from edgeinfer_kernels.sizes.cuda_matrices import padded_rows
from edgeinfer_kernels.sizes.model_sizes import NEURON_GROUP

CACHED_AT = 24
LOST_AT = 25
ROWS = 16


@dataclass(frozen=True)
class Activations:
    """A buffer of activations (tokens, planes, blocks) int32."""

    words: Tensor
    planes: int
    blocks: int

    def of_blocks(self, blocks: int) -> "Activations":
        """The same memory with a shorter row length."""
        return Activations(self.words, self.planes, blocks)


def _has_floats(*matrices: DeviceMatrix | None) -> bool:
    return any(m is not None and m.shapes.tile.code in FLOAT_CODES for m in matrices)


class Workspace:
    """The buffers of a decode step; in a counting arena only their size is counted."""

    def __init__(self, model: DeviceModel, arena: Arena) -> None:
        facts = model.specification
        tokens, width = MAX_TOKENS, facts.width
        first = model.layers[0]
        of_width = [
            m for layer in model.layers for m in (*layer.attention.qkv.parts, *layer.feed_forward.entered)
        ]
        heads = max(layer.attention.heads * layer.attention.head_dim for layer in facts.layers)
        self.state = arena.take((STATE_WORDS,), torch.int32)
        self.x = arena.take((tokens, width), torch.float32)
        self.y = arena.take((tokens, padded_rows(width)), torch.float32)
        self.entering = [
            self._activations(arena, width, _has_floats(model.head, *of_width)) for _ in range(2)
        ]
        outputs = [layer.attention.output for layer in model.layers]
        self.mixed = self._activations(arena, heads, _has_floats(*outputs))
        self._take_hidden(arena, model, _has_floats(*of_width))
        self.squares = [arena.take((tokens, padded_rows(width) // ROWS), torch.float32) for _ in range(2)]
        qkv_rows = max(layer.attention.qkv.rows for layer in model.layers)
        self.qkv = arena.take((tokens, qkv_rows), torch.float32)
        self.flat = arena.take((tokens, heads), torch.float32)
        tiles = [
            (
                a.kv_heads * MAX_SPLITS * attention_rows(a.heads, a.kv_heads, tokens),
                head_dimensions(a.head_dim),
            )
            for a in (layer.attention for layer in facts.layers)
        ]
        kv_heads = max(layer.attention.kv_heads for layer in facts.layers)
        self.parts = arena.take((max(rows * columns for rows, columns in tiles),), torch.float32)
        self.peaks = arena.take((max(rows for rows, _ in tiles), 2), torch.float32)
        self.arrived = arena.take((kv_heads,), torch.int32)
        self.logits = arena.take((tokens, facts.vocabulary_size), torch.float32)
        programs = model.head.shapes.padded_rows // ROWS
        self.best = arena.take((tokens, programs), torch.float32)
        self.best_ids = arena.take((tokens, programs), torch.int32)
        self.nothing = first.attention.output.words  # Dummy pointer for kernel arguments that are not used.

    def _take_hidden(self, arena: Arena, model: DeviceModel, floats_enter: bool) -> None:
        """Buffers for hidden rows of dense layers, of experts and of shared experts, which differ in
        length.
        """
        facts = model.specification
        floats = _has_floats(*(matrix for layer in model.layers for matrix in layer.feed_forward.downs))
        dense = [
            w for w in (layer.feed_forward for layer in model.layers) if isinstance(w, DeviceFeedForward)
        ]
        padded = max((w.hidden for w in dense if w.hidden % NEURON_GROUP), default=0)
        whole = max((w.hidden for w in dense if w.hidden % NEURON_GROUP == 0), default=0)
        self._padded_hidden = self._activations(arena, padded, floats)
        self._whole_hidden = self._activations(arena, max(padded, whole), floats)
        mixtures = [w for w in (layer.feed_forward for layer in model.layers) if isinstance(w, DeviceExperts)]
        self.routing = RoutingSpace(facts, arena, MAX_TOKENS)
        hidden = max((w.hidden for w in mixtures), default=0)
        self.expert_hidden = self._activations(arena, hidden, floats, self.routing.used)
        self.shared_hidden = self._activations(
            arena, max((w.shared_hidden for w in mixtures), default=0), floats
        )
        early = any(fact.early for fact in expert_facts(facts))
        self.early = self._activations(arena, facts.width, floats_enter, int(early))

    def hidden(self, w: DeviceFeedForward) -> Activations:
        """The buffer for hidden rows of a dense feed-forward, or of its part on the device.

        The padding of rows must stay zero, so rows of another length must not share the buffer.
        """
        found = self._padded_hidden if w.hidden % NEURON_GROUP else self._whole_hidden
        return found.of_blocks(w.down.shapes.blocks)

    @staticmethod
    def _activations(arena: Arena, columns: int, floats: bool, rows_a_token: int = 1) -> Activations:
        planes, blocks = 44 if floats else 12, padded_blocks(columns)
        rows = rows_a_token * MAX_TOKENS
        return Activations(arena.take((rows, planes, blocks), torch.int32), planes, blocks)
