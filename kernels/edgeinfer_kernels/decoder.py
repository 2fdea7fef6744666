"""A decoder: layers of blocks with norms and residuals, and the weights of all of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.blocks.common.block import NormSpec, TensorReader
from edgeinfer_kernels.matrix import Matrix, Vector
from edgeinfer_kernels.recurrent_state import RecurrentShape, slots_for


class BlockIndex(NamedTuple):
    """A block of a decoder: its layer, and its position within the layer."""

    layer: int
    position: int


S = TypeVar("S")
W = TypeVar("W")
B = TypeVar("B")


@dataclass(frozen=True)
class ResidualBlock(Generic[S]):
    """x += residual_scale · post_norm(block(norm(x))).

    `norm_name`, `post_norm_name`: the GGUF names of the norms within the layer; "": there is none.
    `post_norm_epsilon`: the ε of the norm after the block; 0: that of the norm before it.
    `shares_input`: the block reads the same x as the block before it (parallel blocks), with its own norm or
    the same norm(x): with a, b the two blocks, x += a(norm(x)) + b(norm(x)).
    """

    block: S
    norm: NormSpec
    norm_name: str = ""
    post_norm_name: str = ""
    residual_scale: float = 1.0
    shares_input: bool = False
    post_norm_epsilon: float = 0.0

    @property
    def has_own_norm(self) -> bool:
        """Whether it shares its input, but not the norm."""
        return self.shares_input and bool(self.norm_name)

    @property
    def post_norm_spec(self) -> NormSpec:
        return replace(self.norm, epsilon=self.post_norm_epsilon) if self.post_norm_epsilon else self.norm

    def read(self, tensors: TensorReader) -> "ResidualWeights[Any]":
        """Read the weights of the block and of its norms."""
        width, name, post = tensors.hidden_size, self.norm_name, self.post_norm_name
        spec: Any = self.block
        return ResidualWeights(
            block=spec.read(tensors),
            norm=_norm_weight(tensors, name, self.norm) if name else None,
            norm_bias=tensors.vector(f"{name}.bias", width) if name else None,
            post_norm=tensors.required(f"{post}.weight", width) if post else None,
        )


def _norm_weight(tensors: TensorReader, name: str, norm: NormSpec) -> Vector:
    """The weight of a norm; Falcon-H1's files have one without `.weight` in its name."""
    if not norm.has_weights:
        return np.ones(tensors.hidden_size, np.float32)
    bare = tensors.vector(name, tensors.hidden_size)
    return tensors.required(f"{name}.weight", tensors.hidden_size) if bare is None else bare


@dataclass(frozen=True)
class LayerSpec:
    """The blocks of a layer, in order.

    Of parallel blocks only the first can be divisible: the hidden states that a part on another device reads
    are those before the layer's results.
    """

    blocks: tuple[ResidualBlock[Any], ...]

    def __post_init__(self) -> None:
        for position, each in enumerate(self.blocks):
            if each.shares_input and (position == 0 or each.block.is_divisible):
                raise ValueError(f"block {position} of the layer can't share the input of the one before it")

    def parallel(self, position: int) -> range:
        """The positions of the block at `position` and of those that share its input or whose input it
        shares.
        """
        first = last = position
        while self.blocks[first].shares_input:
            first -= 1
        while last + 1 < len(self.blocks) and self.blocks[last + 1].shares_input:
            last += 1
        return range(first, last + 1)

    def has_shared_norm(self, position: int) -> bool:
        """Whether the block after the one at `position` reads the same normed input."""
        following = self.blocks[position + 1 : position + 2]
        return any(each.shares_input and not each.has_own_norm for each in following)

    def block_of(self, kind: type[B]) -> B:
        """The layer's first block of a kind. Raises `LookupError`: it has none."""
        return _first([residual.block for residual in self.blocks], kind)

    def with_slots(self, slots: int) -> "LayerSpec":
        """The same layer with this number of slots in each recurrent state."""
        return LayerSpec(
            tuple(
                replace(each, block=replace(each.block, slots=slots)) if each.block.recurrent else each
                for each in self.blocks
            )
        )


@dataclass(frozen=True)
class DecoderSpec:
    """The whole decoder. Logits are multiplied by `logit_scale`, then soft-capped if logit_soft_cap is
    not 0.
    """

    hidden_size: int
    vocabulary_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0
    norm_name: str = "output_norm"
    """The GGUF name of the final norm; "": there is none."""
    per_layer_width: int = 0
    """Elements of each layer's input from the per-layer embeddings of a token; 0: there are none."""

    def of_layers(self, first: int, last: int) -> "DecoderSpec":
        """The same specification with only layers first..last."""
        return replace(self, layers=self.layers[first:last])

    @property
    def is_recurrent(self) -> bool:
        """Whether a block has a recurrent state."""
        return bool(self._recurrent_shapes)

    @property
    def takes_trees(self) -> bool:
        """Whether each block with a recurrent state can process a draft tree."""
        blocks = (each.block for layer in self.layers for each in layer.blocks)
        return all(block.takes_trees for block in blocks if block.recurrent is not None)

    @property
    def is_encoder(self) -> bool:
        """Whether the tokens of a text attend to all of it, so that there are no logits of a next token."""
        return any(each.block.kind == "encoder_attention" for layer in self.layers for each in layer.blocks)

    @property
    def reads_other_layers(self) -> bool:
        """Whether layers read keys, values or inputs that other layers compute: all blocks except divisible
        ones have to be on one device.
        """
        shared = any(each.block.source_layer is not None for layer in self.layers for each in layer.blocks)
        return shared or self.per_layer_width > 0

    @property
    def has_raw_draft_states(self) -> bool:
        """Whether it is a draft head that reads hidden states before the norm."""
        first = (each.block for layer in self.layers[:1] for each in layer.blocks)
        return any(getattr(block, "raw_states", False) for block in first)

    @property
    def has_positions(self) -> bool:
        """Whether embeddings have learned rows of their positions."""
        first = (each.block for layer in self.layers[:1] for each in layer.blocks)
        return any(block.kind == "embedding.positions" for block in first)

    @property
    def slots(self) -> int:
        """Number of slots of each recurrent state; 0: none is recurrent."""
        return max((shape.slots for shape in self._recurrent_shapes), default=0)

    @cached_property
    def _recurrent_shapes(self) -> list[RecurrentShape]:
        shapes = [each.block.recurrent for layer in self.layers for each in layer.blocks]
        return [shape for shape in shapes if shape is not None]

    def with_slots(self) -> "DecoderSpec":
        """The same decoder with the number of slots that the size of all recurrent states permits."""
        shapes = self._recurrent_shapes
        if not shapes:
            return self
        slots = slots_for(sum(4 * shape.slot_width for shape in shapes))
        return replace(self, layers=tuple(layer.with_slots(slots) for layer in self.layers))

    def with_whole_caches(self) -> "DecoderSpec":
        """The same decoder without rings: the caches of windows hold all positions."""

        def whole(residual: ResidualBlock[Any]) -> ResidualBlock[Any]:
            block = residual.block
            return replace(residual, block=replace(block, ring=0)) if hasattr(block, "ring") else residual

        layers = (LayerSpec(tuple(whole(each) for each in layer.blocks)) for layer in self.layers)
        return replace(self, layers=tuple(layers))

    def indices(self) -> Iterator[BlockIndex]:
        """All blocks, in order."""
        for layer, spec in enumerate(self.layers):
            for position in range(len(spec.blocks)):
                yield BlockIndex(layer, position)

    def residual(self, index: BlockIndex) -> ResidualBlock[Any]:
        return self.layers[index.layer].blocks[index.position]

    def state_source(self, index: BlockIndex) -> BlockIndex:
        """The block whose state a block reads: itself, or that of another layer."""
        block = self.residual(index).block
        if block.source_layer is None:
            return index
        others = self.layers[block.source_layer].blocks
        position = next(at for at, other in enumerate(others) if isinstance(other.block, type(block)))
        return BlockIndex(block.source_layer, position)

    def specs(self, kind: type[Any]) -> list[Any]:
        """The specifications of all blocks of a kind, in order."""
        blocks = [residual.block for layer in self.layers for residual in layer.blocks]
        return [block for block in blocks if isinstance(block, kind)]


@dataclass(frozen=True)
class ResidualWeights(Generic[W]):
    """The weights of a block, and of the norms before and after it."""

    block: W
    norm: Vector | None = None
    norm_bias: Vector | None = None
    post_norm: Vector | None = None

    def with_block(self, block: W) -> "ResidualWeights[W]":
        """The same norms around another block."""
        return replace(self, block=block)


@dataclass(frozen=True)
class LayerWeights:
    blocks: tuple[ResidualWeights[Any], ...]

    def block_of(self, kind: type[B]) -> B:
        """The weights of the layer's first block of a kind. Raises `LookupError`: it has none."""
        return _first([residual.block for residual in self.blocks], kind)


def _first(blocks: Sequence[Any], kind: type[B]) -> B:
    for block in blocks:
        if isinstance(block, kind):
            return block
    raise LookupError(f"the layer has no {kind.__name__}")


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of a decoder; `output` is `token_embd` itself if the file ties them."""

    token_embd: Matrix
    output: Matrix
    output_norm: Vector | None
    output_norm_bias: Vector | None
    layers: tuple[LayerWeights, ...]
    position_rows: Vector | None = None
    """(positions, hidden_size), added to the embeddings of an encoder's texts; later positions have the last
    row. None: nothing is added."""
    output_bias: Vector | None = None
    """(vocabulary,): added to the products of the head, before the scale of logits."""
    per_layer_token_embd: Matrix | None = None
    """The per-layer embeddings, (vocabulary, layers · per_layer_width); it stays in the file."""
    output_ids: npt.NDArray[np.int64] | None = None
    """(vocabulary,): the token ids of the rows of `output`, of a draft head; None: they are 0…"""

    @property
    def all_position_rows(self) -> Vector | None:
        """`position_rows`, one after another."""
        return None if self.position_rows is None else self.position_rows.reshape(-1)

    def residual(self, index: BlockIndex) -> ResidualWeights[Any]:
        return self.layers[index.layer].blocks[index.position]

    def matrices(self, *, head: bool = True) -> list[Matrix]:
        """Every matrix that takes part in a matmul, each once; the embedding only if it is a tied head."""
        matrices = [
            m for layer in self.layers for residual in layer.blocks for m in residual.block.matrices()
        ]
        return [*matrices, self.output] if head else matrices


def blocks_of(
    spec: DecoderSpec, weights: DecoderWeights, indices: Sequence[BlockIndex] | None = None
) -> Iterator[tuple[BlockIndex, ResidualBlock[Any], ResidualWeights[Any]]]:
    """Index, specification and weights of all blocks, or of some."""
    for index in spec.indices() if indices is None else indices:
        yield index, spec.residual(index), weights.residual(index)
