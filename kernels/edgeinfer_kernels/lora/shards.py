"""The LoRA adapters of one device of a split model: of its matrices, or of its parts of matrices."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from edgeinfer_kernels.blocks.feed_forward import FeedForwardWeights
from edgeinfer_kernels.blocks.moe import MoeWeights
from edgeinfer_kernels.lora.weights import LoraWeights, ModelLora
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.stages import Shard

Blocks = Iterable[tuple[Any, Any, Shard]]
"""The weights of blocks in the whole model, their part on the device, and the shard of their layer."""


def shard_lora(lora: ModelLora, blocks: Blocks, others: Iterable[Matrix] = ()) -> ModelLora:
    """The adapters of the parts of `blocks` and of `others`, by the ids of the matrices on the device;
    without that of the embedding.
    """
    found = {id(each): lora.matrices[id(each)] for each in others if id(each) in lora.matrices}
    for whole, part, shard in blocks:
        for source, own, rows, columns in _parts(whole, part, shard):
            weights = lora.matrices.get(id(source))
            if weights is not None and own.rows and own.columns and own.experts:
                experts = shard.experts if own.experts < source.experts else None
                found[id(own)] = cut(weights, rows, columns, experts)
    return ModelLora(found)


def _parts(
    whole: Any, part: Any, shard: Shard
) -> Iterator[tuple[Matrix, Matrix, range | None, range | None]]:
    """The matrices of a block that the device multiplies: as in the file, its part, and which of the rows and
    columns it has (None: all).
    """
    if isinstance(whole, FeedForwardWeights):
        for name in ("ffn_up", "ffn_gate"):
            if getattr(whole, name) is not None:
                yield getattr(whole, name), getattr(part, name), shard.neurons, None
        yield whole.ffn_down, part.ffn_down, None, shard.neurons
        return
    matrices = "matrices" if shard.undivided or not isinstance(whole, MoeWeights) else "granule_matrices"
    for source, own in zip(getattr(whole, matrices)(), getattr(part, matrices)(), strict=True):
        yield source, own, None, None


def cut(
    weights: LoraWeights, rows: range | None, columns: range | None, experts: Sequence[int] | None
) -> LoraWeights:
    """The part of an adapter for these rows and columns, or for these experts; None: all."""
    a, b = weights.a, weights.b
    if rows is not None:
        b = b[:, rows.start : rows.stop]
    if columns is not None:
        a = a[:, :, columns.start : columns.stop]
    if experts is not None:
        a, b = a[list(experts)], b[list(experts)]
    return replace(weights, a=a, b=b)
