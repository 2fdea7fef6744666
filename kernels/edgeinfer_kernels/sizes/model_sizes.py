"""The sizes of a decoder without its weights, from which all byte counts are computed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from edgeinfer_kernels.specification import DecoderSpecification, ExpertsSpecification, RopeSpecification
from edgeinfer_kernels.weights import (
    AttentionWeights,
    DecoderWeights,
    ExpertWeights,
    FeedForwardWeights,
    Matrix,
    Vector,
)
from edgeinfer_quant_formats import block_format

NEURON_GROUP = 512
"""Neurons that a split feed-forward assigns together: whole blocks of every format, without padding on a GPU.
"""


@dataclass(frozen=True)
class MatrixSize:
    """Shape and format of a weight matrix; two of equal shape and format compare equal."""

    name: str = field(compare=False)
    format: str
    rows: int
    columns: int
    experts: int = 1

    @classmethod
    def of(cls, matrix: Matrix) -> "MatrixSize":
        """The size of a matrix, or of one expert's matrix."""
        return cls(matrix.name, matrix.format, matrix.rows, matrix.columns)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return block_format(self.format).nbytes((self.rows, self.columns))

    @property
    def weights(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class FeedForwardSizes:
    """up, down and, if gated, gate; `vectors`: lengths of norms and of the vectors added after down.

    `biased`: gate or up has a bias. `post_normed`: a norm follows the sum.
    """

    up: MatrixSize
    down: MatrixSize
    gate: MatrixSize | None = None
    vectors: tuple[int, ...] = ()
    biased: bool = False
    post_normed: bool = False

    @property
    def neurons(self) -> int:
        return self.up.rows

    @property
    def is_divisible(self) -> bool:
        """Whether its neurons can be split between two devices: not if a post-norm follows."""
        return not self.post_normed

    def matrices(self) -> list[MatrixSize]:
        return [matrix for matrix in (self.gate, self.up, self.down) if matrix is not None]

    def part(self, neurons: int) -> "FeedForwardSizes":
        """The sizes of a part with this many neurons."""
        return replace(
            self,
            up=replace(self.up, rows=neurons),
            gate=None if self.gate is None else replace(self.gate, rows=neurons),
            down=replace(self.down, columns=neurons),
        )


@dataclass(frozen=True)
class ExpertSizes:
    """`count` experts of equal size, `used` of them per token; `shared` is computed for every token.

    `expert.vectors` are the bias lengths of one expert; the norm is counted with the attention.
    """

    count: int
    used: int
    expert: FeedForwardSizes
    router: MatrixSize
    shared: FeedForwardSizes | None = None
    early: bool = False
    """Pre-attention router: it reads the layer's input."""
    router_biased: bool = False
    shared_weighed: bool = False
    """Whether one more float32 row gates the shared expert per token."""

    def always(self) -> list[MatrixSize]:
        """The matrices that every token reads: the router and the shared expert."""
        return [self.router, *(self.shared.matrices() if self.shared else ())]


@dataclass(frozen=True)
class LayerSizes:
    """One layer, with a dense feed-forward or experts. `window` 0: a token attends to all tokens before it.

    `vectors`: lengths of the attention's norms and biases. Layers of the same `rope_table` share it.
    """

    heads: int
    kv_heads: int
    head_dim: int
    q: MatrixSize
    k: MatrixSize
    v: MatrixSize
    output: MatrixSize
    vectors: tuple[int, ...] = ()
    window: int = 0
    rope_table: int = 0
    feed_forward: FeedForwardSizes | None = None
    experts: ExpertSizes | None = None

    def attention_matrices(self) -> list[MatrixSize]:
        return [self.q, self.k, self.v, self.output]

    def divisible(self) -> FeedForwardSizes:
        """The dense feed-forward, or one expert."""
        found = self.feed_forward or (self.experts.expert if self.experts else None)
        if found is None:
            raise ValueError("a layer has neither a feed-forward nor experts")
        return found

    def feed_forwards(self) -> list[FeedForwardSizes]:
        """The dense feed-forward; or one expert and the shared expert, if any."""
        shared = [self.experts.shared] if self.experts and self.experts.shared else []
        return [self.divisible(), *shared]

    def matrices(self) -> Iterator[MatrixSize]:
        """Every matrix that a token may be multiplied with; that of each expert once."""
        yield from self.attention_matrices()
        if self.feed_forward:
            yield from self.feed_forward.matrices()
        if self.experts:
            yield from self.experts.always()
            yield from self.experts.expert.matrices() * self.experts.count


@dataclass(frozen=True)
class ModelSizes:
    """A whole decoder. `embedding` None: the head is also the embedding. `vectors`: of the final norm."""

    width: int
    vocabulary: int
    layers: tuple[LayerSizes, ...]
    head: MatrixSize
    embedding: MatrixSize | None = None
    vectors: tuple[int, ...] = ()

    @classmethod
    def of(cls, specification: DecoderSpecification, weights: DecoderWeights) -> "ModelSizes":
        """The sizes of a loaded decoder."""
        tables: dict[tuple[RopeSpecification | None, int], int] = {}
        layers = []
        for facts, layer in zip(specification.layers, weights.layers, strict=True):
            attention, w = facts.attention, layer.attention
            table = tables.setdefault((attention.rope, attention.head_dim), len(tables))
            q, k, v, output = map(MatrixSize.of, w.matrices())
            block, second = layer.feed_forward, facts.feed_forward
            experts = isinstance(block, ExpertWeights)
            layers.append(
                LayerSizes(
                    attention.heads,
                    attention.kv_heads,
                    attention.head_dim,
                    q,
                    k,
                    v,
                    output,
                    _attention_vectors(w) + (_lengths(block.ffn_norm) if experts else ()),
                    attention.window,
                    table,
                    _feed_forward(block) if isinstance(block, FeedForwardWeights) else None,
                    _experts(block, second) if isinstance(second, ExpertsSpecification) else None,
                )
            )
        tied = weights.token_embd is weights.output
        return cls(
            specification.width,
            specification.vocabulary_size,
            tuple(layers),
            MatrixSize.of(weights.output),
            None if tied else MatrixSize.of(weights.token_embd),
            _lengths(weights.output_norm, weights.output_norm_bias),
        )

    @property
    def table(self) -> MatrixSize:
        """The matrix whose rows are the tokens' embeddings."""
        return self.embedding or self.head

    def matrices(self) -> Iterator[MatrixSize]:
        """Every matrix that takes part in a matmul; the embedding only if it is a tied head."""
        for layer in self.layers:
            yield from layer.matrices()
        yield self.head

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices in the file."""
        return sum(matrix.nbytes for matrix in self.matrices()) + (
            self.embedding.nbytes if self.embedding else 0
        )


def _lengths(*vectors: Vector | None) -> tuple[int, ...]:
    return tuple(len(vector) for vector in vectors if vector is not None)


def _attention_vectors(w: AttentionWeights) -> tuple[int, ...]:
    """Vector lengths of the attention; the biases of q, k and v share one vector, see `stacked_bias`."""
    biases = (w.attn_q_bias, w.attn_k_bias, w.attn_v_bias)
    stacked = stacked_bias((w.attn_q.rows, w.attn_k.rows, w.attn_v.rows)) if any_of(biases) else ()
    others = (w.attn_output_bias, w.attn_norm, w.attn_norm_bias, w.attn_post_norm)
    return (*stacked, *_lengths(*others, w.attn_q_norm, w.attn_k_norm, w.attn_sinks))


def any_of(vectors: Sequence[Vector | None]) -> bool:
    return any(vector is not None for vector in vectors)


def stacked_bias(rows: Sequence[int]) -> tuple[int, ...]:
    """The length of one vector for matrices of these row counts, each padded to sixteen."""
    return (sum(-(-count // 16) * 16 for count in rows),)


def _experts(w: FeedForwardWeights | ExpertWeights, facts: ExpertsSpecification) -> ExpertSizes:
    assert isinstance(w, ExpertWeights)
    up, down, gate = map(MatrixSize.of, w.stacks())
    biases = _lengths(w.ffn_gate_exps_bias, w.ffn_up_exps_bias, w.ffn_down_exps_bias)
    return ExpertSizes(
        facts.count,
        facts.used,
        FeedForwardSizes(up, down, gate, tuple(length // facts.count for length in biases)),
        MatrixSize.of(w.ffn_gate_inp),
        _feed_forward(w.shared) if w.shared else None,
        facts.early,
        w.ffn_gate_inp_bias is not None,
        w.ffn_gate_inp_shexp is not None,
    )


def _feed_forward(w: FeedForwardWeights) -> FeedForwardSizes:
    return FeedForwardSizes(
        MatrixSize.of(w.ffn_up),
        MatrixSize.of(w.ffn_down),
        None if w.ffn_gate is None else MatrixSize.of(w.ffn_gate),
        _lengths(w.ffn_down_bias, w.ffn_norm, w.ffn_norm_bias, w.ffn_post_norm),
        any_of((w.ffn_gate_bias, w.ffn_up_bias)),
        w.ffn_post_norm is not None,
    )
