"""The sizes of a decoder without its weights, from which all byte counts are computed."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from edgeinfer_kernels.blocks.common.block_sizes import BlockSizes, DivisibleSizes, NormLengths
from edgeinfer_kernels.blocks.embedding.assistant_input import AssistantInputSizes
from edgeinfer_kernels.blocks.embedding.draft_input import HEAD_BATCH, DraftInputSizes
from edgeinfer_kernels.blocks.embedding.eagle_input import EagleInputSizes
from edgeinfer_kernels.blocks.embedding.fused_states import FusedStatesSizes
from edgeinfer_kernels.blocks.embedding.medusa_head import MedusaHeadSizes
from edgeinfer_kernels.blocks.encoder_attention import EncoderAttentionSizes
from edgeinfer_kernels.caches.layer_cache import pool_positions
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_kernels.matrix import MatrixSize, vector_lengths
from edgeinfer_kernels.sizes.cuda_matrices import cache_positions, matrix_bytes, taken, vector_bytes


@dataclass(frozen=True)
class LayerSizes:
    """The blocks of one layer; at most one of them is divisible."""

    blocks: tuple[BlockSizes, ...]

    @property
    def undivided(self) -> list[BlockSizes]:
        """The blocks that are always on one device as a whole."""
        return [block for block in self.blocks if not block.is_divisible]

    @property
    def undivided_label(self) -> str:
        """The name of the undivided blocks in plans."""
        return " and ".join(dict.fromkeys(block.label for block in self.undivided))

    def state_name(self, context: int) -> str:
        """The name of the state for this context in plans."""
        return " and ".join(block.state_name(context) for block in self.blocks if block.state_label)

    @property
    def divisible(self) -> DivisibleSizes | None:
        """The block whose units can be on different devices."""
        return next((block for block in self.blocks if isinstance(block, DivisibleSizes)), None)

    @property
    def routed(self) -> DivisibleSizes | None:
        """The divisible block, if a router selects its units."""
        block = self.divisible
        return block if block is not None and block.is_routed else None

    def matrices(self) -> Iterator[MatrixSize]:
        """Every matrix that a token may be multiplied with; that of each expert once."""
        for block in self.blocks:
            yield from block.matrices()


PER_LAYER = "per-layer embeddings"
"""The name of their table in plans and in lists of device memory."""


@dataclass(frozen=True)
class ModelSizes:
    """A whole decoder. `embedding` None: the head is also the embedding. `vectors`: lengths of
    the vectors of the final norm and the head, of all learned positions together, and of the ids of the
    output's rows.
    """

    hidden_size: int
    vocabulary: int
    layers: tuple[LayerSizes, ...]
    head: MatrixSize
    embedding: MatrixSize | None = None
    vectors: tuple[int, ...] = ()
    per_layer: MatrixSize | None = None
    """The per-layer embeddings, of which rows are read from the file."""
    shares_head: bool = False
    """Whether `head` is a matrix of another model, as that of most draft heads."""
    shares_embedding: bool = False
    """Whether the embedding is a matrix of another model."""
    further_heads: "tuple[ModelSizes, ...]" = ()
    """The sizes of further draft heads, each a decoder with its own buffers."""
    target_layers: tuple[int, ...] = ()
    """After how many layers of its target a draft head reads hidden states; empty: after the output norm."""
    decoded: MatrixSize | None = None
    """A matrix of a draft head on the CPU that it keeps as float32."""

    def with_whole_caches(self) -> "ModelSizes":
        """As `DecoderSpec.with_whole_caches`."""
        layers = (
            LayerSizes(tuple(block.with_whole_cache() for block in each.blocks)) for each in self.layers
        )
        return replace(self, layers=tuple(layers))

    @classmethod
    def of(cls, spec: DecoderSpec, weights: DecoderWeights) -> "ModelSizes":
        """The sizes of a decoder; only shapes of the weights are read."""
        layers = []
        for layer, given in zip(spec.layers, weights.layers, strict=True):
            blocks = []
            for position, (residual, w) in enumerate(zip(layer.blocks, given.blocks, strict=True)):
                lengths = vector_lengths(w.norm, w.norm_bias, w.post_norm)
                is_followed = position + 1 < len(layer.blocks)
                is_shared = layer.has_shared_norm(position)
                norms = NormLengths(
                    lengths, w.post_norm is not None, is_shared, is_followed, residual.has_own_norm
                )
                blocks.append(residual.block.sizes(w.block, norms))
            layers.append(LayerSizes(tuple(blocks)))
        tied = weights.token_embd is weights.output
        return cls(
            spec.hidden_size,
            spec.vocabulary_size,
            tuple(layers),
            MatrixSize.of(weights.output),
            None if tied else MatrixSize.of(weights.token_embd),
            vector_lengths(
                weights.output_norm,
                weights.output_norm_bias,
                weights.all_position_rows,
                weights.output_bias,
            )
            + (() if weights.output_ids is None else (len(weights.output_ids),)),
            None if weights.per_layer_token_embd is None else MatrixSize.of(weights.per_layer_token_embd),
        )

    @property
    def table(self) -> MatrixSize:
        """The matrix whose rows are the tokens' embeddings."""
        return self.embedding or self.head

    @property
    def blocks(self) -> list[BlockSizes]:
        """All blocks of all layers."""
        return [block for layer in self.layers for block in layer.blocks]

    @property
    def is_encoder(self) -> bool:
        """Whether it is an encoder, which has no steps of one token."""
        return bool(self.of_kind(EncoderAttentionSizes))

    @property
    def is_draft_head(self) -> bool:
        """Whether it is a draft head, which reads hidden states of its target, or a Markov head, which has
        no layers.
        """
        kinds = DraftInputSizes, EagleInputSizes, FusedStatesSizes, AssistantInputSizes, MedusaHeadSizes
        return not self.layers or any(self.of_kind(kind) for kind in kinds)

    def reads_between(self, layers: int) -> bool:
        """Whether a draft head reads states between the layers of its target, which has this number, or the
        target's caches; so a block drafter may.
        """
        reads_states = any(each < layers for each in self.target_layers)
        return reads_states or self.drafts_blocks or self.reads_caches

    @property
    def drafts_pairs(self) -> bool:
        """Whether it is a draft head that drafts token by token, from pairs of a token and a state."""
        return any(self.of_kind(kind) for kind in (DraftInputSizes, EagleInputSizes))

    @property
    def drafts_blocks(self) -> bool:
        """Whether it is a block drafter."""
        return bool(self.of_kind(FusedStatesSizes))

    @property
    def reads_caches(self) -> bool:
        """Whether it is a draft head that reads caches of its target."""
        return bool(self.of_kind(AssistantInputSizes))

    @property
    def state_width(self) -> int:
        """Elements of the hidden states of one position that a draft head reads of its target."""
        for assistant in self.of_kind(AssistantInputSizes):
            return int(assistant.post.rows)
        return next(iter(self.fused_widths), self.hidden_size)

    @property
    def fused_widths(self) -> list[int]:
        """Elements of the states after several layers that a draft head fuses; empty: it does not."""
        blocks = [*self.of_kind(EagleInputSizes), *self.of_kind(FusedStatesSizes)]
        return [block.fc.columns for block in blocks]

    def as_head_of_split(self, target: "ModelSizes") -> "ModelSizes":
        """A draft head on the GPU of a split target, which embeds on the CPU: the head, or the first one that
        shares it, has a copy of the embedding, unless it is the target's output, or the head reads no tokens.
        """
        if target.embedding is None or self.of_kind(MedusaHeadSizes):
            return self
        if self.reads_caches:  # On a GPU it doesn't read its own.
            return replace(self, embedding=target.embedding)
        return self._first_of_heads(
            lambda head: head.shares_embedding, lambda head: replace(head, shares_embedding=False)
        )

    def as_head_of_ranks(self, target: "ModelSizes") -> "ModelSizes":
        """A draft head on one rank of tensor parallel, which has the target's embedding, but only some rows
        of its output: the head has a copy of the output, unless that is the embedding.
        """
        if target.embedding is None:
            return self
        return self._first_of_heads(
            lambda head: head.shares_head, lambda head: replace(head, shares_head=False)
        )

    def _first_of_heads(
        self, found: Callable[["ModelSizes"], bool], changed: Callable[["ModelSizes"], "ModelSizes"]
    ) -> "ModelSizes":
        """The heads, with the first one of a kind changed."""
        heads = [self, *self.further_heads]
        for index, head in enumerate(heads):
            if found(head):
                heads[index] = changed(head)
                break
        return replace(heads[0], further_heads=tuple(heads[1:]))

    @property
    def has_device_kernels(self) -> bool:
        """Whether a GPU runs it and its further heads; it runs no Markov heads, which have no layers."""
        own = bool(self.layers) and all(block.has_device_kernels for block in self.blocks)
        return own and all(head.has_device_kernels for head in self.further_heads)

    @property
    def reads_prompts(self) -> bool:
        """Whether it processes the tokens of prompts: Medusa heads and assistants don't."""
        return not (self.of_kind(MedusaHeadSizes) or self.of_kind(AssistantInputSizes))

    @property
    def draft_batch(self) -> int:
        """Maximum tokens of a step of a draft head."""
        return HEAD_BATCH if self.reads_prompts else 1

    def has_pages(self, positions: int) -> bool:
        """Whether sequences can share caches of this number of positions: there are no recurrent states, and
        no windows in rings.
        """
        return all(block.has_device_pages(positions) for block in self.blocks)

    def sequences_of_draft(self, context: int, sequences: int) -> int:
        """How many of the target's sequences it holds as a draft model: all of them, or only the one that is
        decoded alone.
        """
        shares = not self.is_draft_head and self.has_pages(pool_positions(context, sequences))
        return sequences if shares else 1

    @property
    def is_recurrent(self) -> bool:
        """Whether a block has a recurrent state."""
        return any(block.is_recurrent for block in self.blocks)

    def of_kind(self, kind: type[Any]) -> list[Any]:
        """The blocks of one kind of sizes."""
        return [block for block in self.blocks if isinstance(block, kind)]

    def by_kind(self) -> dict[type[BlockSizes], list[BlockSizes]]:
        """The blocks, by kind in order of appearance."""
        kinds: dict[type[BlockSizes], list[BlockSizes]] = {}
        for block in self.blocks:
            kinds.setdefault(type(block), []).append(block)
        return kinds

    def matrices(self) -> Iterator[MatrixSize]:
        """Every matrix that takes part in a matmul; the embedding only if it is a tied head."""
        for layer in self.layers:
            yield from layer.matrices()
        yield self.head

    @property
    def formats(self) -> set[str]:
        """The formats of `matrices`."""
        return {matrix.format for block in self.blocks for matrix in _distinct(block)} | {self.head.format}

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices in the file."""
        tables = sum(m.nbytes for m in (self.head, self.embedding, self.per_layer) if m is not None)
        return tables + sum(map(_file_bytes, self.blocks))

    def rope_device_bytes(self, context: int) -> int:
        """GPU bytes of the float32 cosines and sines of all positions; layers with the same RoPE share a
        table.
        """
        tables = {table for block in self.blocks if (table := block.rope_table()) is not None}
        return sum(taken(cache_positions(context) * head_dim, 4) for _, head_dim in tables)

    def head_device_bytes(self) -> int:
        """GPU bytes of the final norm and the head. Raises `UnsupportedOnDeviceError`."""
        head = matrix_bytes(self.head)
        return vector_bytes(self.vectors) + (0 if self.shares_head else head)


def _distinct(block: BlockSizes) -> Iterable[MatrixSize]:
    """The matrices of a block, of all experts those of one."""
    if isinstance(block, DivisibleSizes):
        return (*block.undivided(), *block.granule_matrices())
    return block.matrices()


def _file_bytes(block: BlockSizes) -> int:
    """Bytes of all matrices of a block in the file."""
    if isinstance(block, DivisibleSizes):
        return sum(matrix.nbytes for matrix in block.undivided()) + block.file_bytes
    return sum(matrix.nbytes for matrix in block.matrices())
