"""What a model's parts weigh: the items that the memory plan places."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace

from edgeinfer_kernels.backend import CacheType, LayerCache
from edgeinfer_kernels.cpu.memory import interleaved_bytes
from edgeinfer_kernels.cpu.sparse import (
    SparseLayers,
    by_neuron,
    dense_layer,
    neuron_bytes,
    sparse_workspace_bytes,
)
from edgeinfer_kernels.cpu.workspace import workspace_bytes
from edgeinfer_kernels.specification import DecoderSpecification, ExpertsSpecification
from edgeinfer_kernels.weights import DecoderWeights, ExpertWeights, Matrix
from edgeinfer_offload.plan import Item


def weight_items(
    specification: DecoderSpecification, weights: DecoderWeights, repack: bool = True
) -> list[Item]:
    """Attention and feed-forward of every layer, the head; a separate embedding stays in the file, and
    without `repack` all of it. Of a mixture of experts a token reads those that it uses.
    """

    def item(name: str, matrices: Sequence[Matrix], used: int = 1, of: int = 1) -> Item:
        size = interleaved_bytes if repack else _file_bytes
        nbytes = sum(map(size, matrices))
        return Item(name, nbytes, nbytes * used // of, mapped=not repack)

    items = []
    for index, (facts, layer) in enumerate(zip(specification.layers, weights.layers, strict=True)):
        items.append(item(f"layer {index} attention", layer.attention.matrices()))
        second = layer.feed_forward
        if isinstance(second, ExpertWeights):
            assert isinstance(facts.feed_forward, ExpertsSpecification)
            used, count = facts.feed_forward.used, facts.feed_forward.count
            items.append(item(f"layer {index} router and shared expert", second.every_token()))
            items.append(item(f"layer {index} experts", second.stacks(), used, count))
        else:
            items.append(item(f"layer {index} feed-forward", second.matrices()))
    return [*items, item("head", [weights.output])]


def _file_bytes(matrix: Matrix) -> int:
    """Bytes of the matrix in its file."""
    return matrix.nbytes


def cache_items(specification: DecoderSpecification, context: int, kind: CacheType) -> list[Item]:
    """The keys and values of every layer; read in whole when the context is full."""
    sizes = [LayerCache.nbytes_for(layer.attention, context, kind) for layer in specification.layers]
    return [Item(f"layer {index} keys and values", size, size) for index, size in enumerate(sizes)]


def workspace_item(
    specification: DecoderSpecification,
    weights: DecoderWeights,
    batch: int,
    threads: int,
    repack: bool = True,
    sparse: SparseLayers | None = None,
) -> Item:
    """Buffers for a batch of tokens."""
    layers = sparse or {}
    nbytes = workspace_bytes(specification, weights, batch, threads, repack and not layers)
    return Item("workspace", nbytes + sparse_workspace_bytes(specification, weights, layers, threads), 0)


def sparse_items(
    specification: DecoderSpecification,
    weights: DecoderWeights,
    layers: SparseLayers,
    token_bytes: Mapping[int, int],
) -> list[Item]:
    """`weight_items` where the feed-forward of some layers reads active neurons only.

    Such a layer has its weights by neuron and those that are read whole in memory, its predictor, and for
    long steps what lies by neuron once more in the file. `token_bytes`: what a token reads of each layer.
    """
    items = {item.name: item for item in weight_items(specification, weights)}
    for index, predictor in layers.items():
        w, name = dense_layer(weights, index), f"layer {index} feed-forward"
        in_file = by_neuron(w, predictor)
        whole = items[name].nbytes - sum(map(interleaved_bytes, in_file))
        parts = [Item(name, whole + neuron_bytes(w, predictor), token_bytes[index])]
        if predictor:
            size = interleaved_bytes(predictor.first) + interleaved_bytes(predictor.second)
            parts[0] = replace(parts[0], bytes_per_token=token_bytes[index] - size)
            parts.append(Item(f"layer {index} predictor", size, size))
        parts.append(Item(f"{name}, long steps", sum(map(_file_bytes, in_file)), 0, mapped=True))
        items |= {part.name: part for part in parts}
    return list(items.values())


def largest_context(
    specification: DecoderSpecification, kind: CacheType, free_bytes: int, trained: int
) -> int:
    """The most tokens whose keys and values fit `free_bytes`; no more than the model was trained for."""

    def nbytes(context: int) -> int:
        return sum(LayerCache.nbytes_for(layer.attention, context, kind) for layer in specification.layers)

    return bisect_right(range(1, trained + 1), free_bytes, key=nbytes)
