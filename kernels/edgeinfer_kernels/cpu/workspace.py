"""Buffers for a batch of tokens, shared by all layers one after the other; counted before they are made."""

from collections.abc import Callable

from edgeinfer_kernels.backend import padded
from edgeinfer_kernels.cpu.embedding import embedding_scratch
from edgeinfer_kernels.cpu.file_rows import file_rows_scratch
from edgeinfer_kernels.cpu.memory import Arena, allocate, is_float_format
from edgeinfer_kernels.cpu.structures import (
    CACHE_LINE,
    attention_pieces,
    attention_scratch,
    attention_states,
    quantised_bytes,
)
from edgeinfer_kernels.specification import DecoderSpecification, ExpertsSpecification
from edgeinfer_kernels.weights import DecoderWeights, ExpertWeights

PAGE = 4096


def aligned(nbytes: int) -> int:
    """Bytes in whole cache lines."""
    return -(-nbytes // CACHE_LINE) * CACHE_LINE


def expert_rows(used: int) -> int:
    """Rows a token that its experts' activations take: a row for each, and what begun tiles leave empty, as
    an expert with fewer than TILE_TOKENS of them has none.
    """
    return (3 * used + 1) // 2


def expert_workspace(facts: ExpertsSpecification, w: ExpertWeights) -> dict[str, int]:
    """Name -> bytes a token of what a mixture of experts needs beside the buffers that all blocks share."""
    rows, width, hidden = expert_rows(facts.used), w.ffn_gate_inp.columns, w.ffn_up_exps.rows
    found = {
        "expert.scores": 4 * padded(facts.count),
        "expert.ids": 8 * facts.used,
        "expert.weights": 4 * facts.used,
        "expert.places": 8 * facts.used,
        "expert.entries": 8 * facts.used,
        "expert.active": 8 + 24 * facts.used,
        "expert.gathered.quantised": rows * aligned(quantised_bytes(padded(width))),
        "expert.hidden": rows * aligned(4 * padded(hidden)),
        "expert.hidden.quantised": rows * aligned(quantised_bytes(padded(hidden))),
        "expert.gate": rows * aligned(4 * padded(hidden)),
        "expert.out": rows * aligned(4 * padded(width)),
    }
    if is_float_format(w.ffn_up_exps) or is_float_format(w.ffn_gate_exps):
        found["expert.gathered"] = rows * aligned(4 * padded(width))
    if facts.early:
        found["router"] = 4 * padded(width)
        found["router.quantised"] = quantised_bytes(padded(width))
    return found


def workspace_rows(specification: DecoderSpecification, weights: DecoderWeights) -> dict[str, int]:
    """Name -> bytes a token of every buffer that a decoder's blocks need, the widest layer deciding."""
    rows = {"x": 4 * padded(specification.width)}

    def need(name: str, nbytes: int) -> None:
        rows[name] = max(rows.get(name, 0), aligned(nbytes))

    def need_input(name: str, columns: int) -> None:
        need(name, 4 * padded(columns))
        need(f"{name}.quantised", quantised_bytes(padded(columns)))

    need_input("normed", specification.width)
    need("projected", 4 * padded(specification.width))
    for facts, layer in zip(specification.layers, weights.layers, strict=True):
        attention = facts.attention
        need_input("mixed", attention.heads * attention.head_dim)
        need("queries", 4 * attention.heads * padded(attention.head_dim))
        need("projected_q", 4 * padded(layer.attention.attn_q.rows))
        need("projected_k", 4 * padded(layer.attention.attn_k.rows))
        need("projected_v", 4 * padded(layer.attention.attn_v.rows))
        second = layer.feed_forward
        dense = second.shared if isinstance(second, ExpertWeights) else second
        if isinstance(second, ExpertWeights):
            assert isinstance(facts.feed_forward, ExpertsSpecification)
            for name, nbytes in expert_workspace(facts.feed_forward, second).items():
                need(name, nbytes)
        if dense is not None:
            need_input("hidden", dense.ffn_up.rows)
            need("gate", 4 * padded(dense.ffn_up.rows))
    return rows


def whole_tiles(tokens: int) -> int:
    """Tokens for which there is room when a last tile of 16 is begun."""
    return -(-tokens // 16) * 16


def _widest(specification: DecoderSpecification, size: Callable[[int, int], int]) -> int:
    """The largest `size(query heads of a key head, padded head dimension)` of all layers, in whole pages."""
    facts = [layer.attention for layer in specification.layers]
    most = max(size(fact.heads // fact.kv_heads, padded(fact.head_dim)) for fact in facts)
    return -(-most // PAGE) * PAGE


def group_offset(specification: DecoderSpecification) -> int:
    """Where in a thread's scratch rows of the file are interleaved: behind what attention needs."""
    return _widest(specification, attention_scratch)


def scratch_stride(specification: DecoderSpecification, weights: DecoderWeights, repack: bool) -> int:
    """Bytes of one thread's scratch; the first thread's is also the embedding's."""
    group = 0 if repack else file_rows_scratch(weights.matrices())
    blocks = group_offset(specification) + -(-group // PAGE) * PAGE
    return max(blocks, -(-embedding_scratch(weights.token_embd) // PAGE) * PAGE)


def states_bytes(specification: DecoderSpecification, threads: int) -> int:
    """Bytes of the running sums of attention that is cut into pieces."""
    return _widest(specification, attention_states) * attention_pieces(threads)


def workspace_bytes(
    specification: DecoderSpecification,
    weights: DecoderWeights,
    batch: int,
    threads: int,
    repack: bool = True,
) -> int:
    """Bytes of a `Workspace` with these arguments."""
    rows = sum(workspace_rows(specification, weights).values())
    scratch = threads * scratch_stride(specification, weights, repack) + states_bytes(specification, threads)
    return whole_tiles(batch) * rows + scratch


class Workspace:
    """The buffers of `workspace_rows` for `batch` tokens, and scratch for `threads`."""

    def __init__(
        self,
        arena: Arena,
        specification: DecoderSpecification,
        weights: DecoderWeights,
        batch: int,
        threads: int,
        repack: bool = True,
    ) -> None:
        self._rows = {
            name: (arena.keep(allocate(stride * whole_tiles(batch))), stride)
            for name, stride in workspace_rows(specification, weights).items()
        }
        self.scratch_stride = scratch_stride(specification, weights, repack)
        self.scratch = arena.keep(allocate(self.scratch_stride * threads))
        self.states = arena.keep(allocate(states_bytes(specification, threads)))

    def rows(self, name: str) -> tuple[int, int]:
        """(address, bytes a token) of a buffer."""
        return self._rows[name]
