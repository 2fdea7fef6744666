"""Arguments that several kernels share: tuples of pointers and numbers, and compile-time configurations.

Triton specializes the elements of a tuple like separate arguments. A configuration (`…Config`) is one
`tl.constexpr`: its hash and representation are part of the key of the compiled kernel, and Triton's hooks
write it as JSON.
"""

from typing import Any, NamedTuple

from edgeinfer_kernels.cuda.weights.plane_formats import Tile


class SumSquares(NamedTuple):
    """What a consumer needs for the norm of x: `sums` (tokens, programs) of squares, and ε."""

    sums: Any
    epsilon: Any


class NormArgs(NamedTuple):
    """A norm of whole rows; weight and bias (columns,) float32."""

    weight: Any
    bias: Any
    epsilon: Any


class InboxArgs(NamedTuple):
    """What the ranks of tensor parallel send each other in a step: words (2, ranks, tokens, columns) int64 in
    the memory of each rank, by their sender, `inbox_here` those of this `rank`: a float32 and, in the upper
    half, its number. `numbers` (tokens, columns) int32 counts the sums from a column on.
    """

    inboxes: tuple[Any, ...]
    inbox_here: Any
    numbers: Any
    rank: Any
    tokens: Any
    columns: Any


class PeerArgs(NamedTuple):
    """Partial sums of a prompt's chunk of each rank of tensor parallel, (tokens, columns) float32, their
    `scales` (tokens,) float32, and the numbers of their programs: `arrived` (ranks, tokens) int64 in the
    memory of each rank, `arrived_here` that of this `rank`; `numbers` (tokens,) int64 counts its sums.
    """

    rows: tuple[Any, ...]
    arrived: tuple[Any, ...]
    arrived_here: Any
    numbers: Any
    rank: Any
    tokens: Any
    scales: tuple[Any, ...]


class RecentArgs(NamedTuple):
    """The recent positions of a layer in f16, as `RecentRows`, with `capacity` positions per head."""

    k: Any
    v: Any
    slots: Any
    capacity: Any


class CacheArgs(NamedTuple):
    """The KV cache of a layer, as in `cache_tiles.py`, with `capacity` positions per head: of a ring, the
    length of the ring. Scales: None in a prompt for types without them. (A field of a Triton tuple can't be
    called `values`.) pages: int32, the cache page that holds each PAGE positions of a sequence; of a batch, a
    row of page_stride for each sequence. recent: a `RecentArgs`, for a type with recent positions.
    """

    k: Any
    k_scales: Any
    v: Any
    v_scales: Any
    capacity: Any
    pages: Any = None
    page_stride: Any = 0
    recent: Any = None


class RopeArgs(NamedTuple):
    """RoPE `table` (positions, head_dim) float32: cosines, then sines; the q and k norms, and their ε; the
    factors of a query after RoPE; the slopes of ALiBi.
    """

    table: Any
    q_norm: Any
    k_norm: Any
    query_weights: Any
    epsilon: Any
    slopes: Any = None


class SplitArgs(NamedTuple):
    """Results of KV splits: weighted values, (largest score, sum) pairs, and the number of splits that have
    arrived, per KV head.
    """

    parts: Any
    peaks: Any
    arrived: Any


class RowSplitArgs(NamedTuple):
    """Sums of programs that share rows, (row groups, splits, columns, 16) float32, and the number of programs
    that have arrived, per row group.
    """

    parts: Any
    arrived: Any


class SharedScores(NamedTuple):
    """Scores of the shared expert's gate, `stride` apart by token."""

    scores: Any
    stride: Any


class InputArgs(NamedTuple):
    """The next block's input: activations, the weights of its norm, and `sums` (tokens, groups) of squares of
    sixteen columns.
    """

    words: Any
    gain: Any
    sums: Any


class WordsConfig(NamedTuple):
    """The layout of activations: blocks per row, and planes."""

    blocks: int
    planes: int


class SourceConfig(NamedTuple):
    """The layout of activations, and how they were normalized: by the sums of squares of `programs`, over
    `width` columns.
    """

    blocks: int
    planes: int
    norm: int
    programs: int
    width: int


class GemvConfig(NamedTuple):
    """The tile config of a GEMV kernel: blocks of a row per iteration, adjacent ones per thread, tokens,
    groups of sixteen rows of a program. warps: those of a program on tensor cores, else 0. unrolled: 1 if
    there is code for each of a few iterations, also for several tokens; above 1: for each iteration of a row
    that has at most as many after the first one; on tensor cores 1 if there is code for several, each of
    which loads the next. splits: programs that share the blocks of a row, without tensor cores.
    """

    step: int
    vector: int
    tokens: int
    groups: int = 1
    warps: int = 0
    unrolled: int = 0
    splits: int = 1

    @property
    def is_unrolled(self) -> bool:
        return self.unrolled > 0 or self.tokens == 1

    @property
    def columns(self) -> int:
        """Rows of the results: a power of two, on tensor cores at least 8."""
        columns = 1 << (self.tokens - 1).bit_length()
        return max(8, columns) if self.warps else columns


class GatedConfig(NamedTuple):
    """The gate and up matrices of a feed-forward; has_gate: without it, `gate` is `up`; is_weighted: the
    products of an expert are multiplied by its weight.
    """

    gate: Tile
    up: Tile
    has_gate: bool
    has_bias: bool
    activation: float
    is_weighted: bool = False


class DownConfig(NamedTuple):
    """The down matrices of experts. shared: a constant of `expert_kernels.py`; is_weighted: as in
    `GatedConfig`, so that the results aren't multiplied by weights.
    """

    tile: Tile
    has_bias: bool
    shared: int
    is_weighted: bool


class NormConfig(NamedTuple):
    """A residual sum and a norm of rows of `width` columns, held in `groups` of sixteen.

    adds: the sum is computed; has_post_norm: after a norm of the summand; is_layer_norm: else RMS;
    scales: the sum is scaled.
    """

    width: int
    groups: int
    adds: bool
    has_post_norm: bool
    has_norm: bool
    is_layer_norm: bool
    has_bias: bool
    scales: bool = False


class AttentionConfig(NamedTuple):
    """The heads of a decode step's attention. …dimensions: head_dim and value_dim, padded; q_head: the
    distance of queries in a row of the projection; k_at, v_at: where keys and values begin there; window 0:
    none; value_dim, temperature, has_value_norm, clamp: as in `AttentionSpec`; is_ring: the cache is a ring;
    queries_only: the keys and values are those of another layer; is_chunked: windows are chunks; is_paged:
    the cache has pages; has_recent: and recent positions; gate: a constant of `attention_splits.py`; gate_at:
    where the gates of whole heads begin in a row of the projection, 0: each element has one.
    """

    kv_heads: int
    group: int
    head_dim: int
    q_head: int
    dimensions: int
    value_dim: int
    value_dimensions: int
    k_at: int
    v_at: int
    qk_norm: int
    key_type: int
    value_type: int
    window: int
    is_capped: bool
    has_sinks: bool
    temperature: float
    temperature_length: int
    has_query_weights: bool
    is_ring: bool
    has_value_norm: bool = False
    queries_only: bool = False
    has_alibi: bool = False
    clamp: float = 0.0
    temperature_offset: int = 0
    is_chunked: bool = False
    is_paged: bool = False
    has_recent: bool = False
    gate: int = 0
    gate_at: int = 0


class SplitConfig(NamedTuple):
    """How a decode step's attention is divided: new tokens of a sequence, query rows of a program, KV splits,
    positions of a tile; is_batch: each token of the step is the one of its sequence. query_tokens: those
    whose queries a program has; combines: its last program adds up the KV splits.
    """

    tokens: int
    queries: int
    splits: int
    positions: int
    is_batch: bool = False
    query_tokens: int = 8
    combines: bool = True


class LatentConfig(NamedTuple):
    """The sizes of latent attention. dimensions, ropes: latent_dim and rope_dim, powers of two. query_dim:
    the distance of queries in a row of the projection. temperature…: as in `Temperature`. is_paged: the cache
    has pages; is_batch: as in `SplitConfig`; has_recent: the cache has recent positions.
    """

    heads: int
    nope_dim: int
    rope_dim: int
    latent_dim: int
    query_dim: int
    dimensions: int
    ropes: int
    cache: int
    has_rope: bool
    temperature: float = 0.0
    temperature_length: int = 1
    temperature_offset: int = 0
    is_ring: bool = False
    is_paged: bool = False
    is_batch: bool = False
    has_recent: bool = False
