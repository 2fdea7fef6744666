"""What a model's parts weigh: the items that the memory plan places."""

from bisect import bisect_right

from edgeinfer_kernels.backend import CacheType, LayerCache
from edgeinfer_kernels.cpu.memory import interleaved_bytes
from edgeinfer_kernels.cpu.workspace import workspace_bytes
from edgeinfer_kernels.specification import DecoderSpecification
from edgeinfer_kernels.weights import DecoderWeights, Matrix
from edgeinfer_offload.plan import Item


def _bytes(*matrices: Matrix | None) -> int:
    return sum(interleaved_bytes(matrix) for matrix in matrices if matrix is not None)


def weight_items(weights: DecoderWeights) -> list[Item]:
    """Attention and feed-forward of every layer, the head; a separate embedding stays in the file."""
    items = []
    for index, layer in enumerate(weights.layers):
        a, f = layer.attention, layer.feed_forward
        attention = _bytes(a.attn_q, a.attn_k, a.attn_v, a.attn_output)
        feed_forward = _bytes(f.ffn_up, f.ffn_gate, f.ffn_down)
        items.append(Item(f"layer {index} attention", attention, attention))
        items.append(Item(f"layer {index} feed-forward", feed_forward, feed_forward))
    head = _bytes(weights.output)
    return [*items, Item("head", head, head)]


def cache_items(specification: DecoderSpecification, context: int, kind: CacheType) -> list[Item]:
    """The keys and values of every layer; read in whole when the context is full."""
    sizes = [LayerCache.nbytes_for(layer.attention, context, kind) for layer in specification.layers]
    return [Item(f"layer {index} keys and values", size, size) for index, size in enumerate(sizes)]


def workspace_item(
    specification: DecoderSpecification, weights: DecoderWeights, batch: int, threads: int
) -> Item:
    """Buffers for a batch of tokens."""
    return Item("workspace", workspace_bytes(specification, weights, batch, threads), 0)


def largest_context(
    specification: DecoderSpecification, kind: CacheType, free_bytes: int, trained: int
) -> int:
    """The most tokens whose keys and values fit `free_bytes`; no more than the model was trained for."""

    def nbytes(context: int) -> int:
        return sum(LayerCache.nbytes_for(layer.attention, context, kind) for layer in specification.layers)

    return bisect_right(range(1, trained + 1), free_bytes, key=nbytes)
