"""Feed-forwards on a GPU of which a step reads only active neurons: what is supported, and buffer sizes."""

from edgeinfer_kernels.blocks.feed_forward import RELU_ACTIVATIONS, FeedForwardSpec, FeedForwardWeights
from edgeinfer_kernels.cpu.runtime.abi import OUTPUTS_PER_TILE
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS
from edgeinfer_kernels.sizes.cuda_matrices import taken

GATHERED_FORMATS = ("Q4_0", "Q8_0", "Q4_K")
"""Formats of down whose columns are gathered."""
GATHERED_SEGMENT = 512
"""Neurons of which the active ones are listed together; see `cuda/sparse/gather_kernels.py`."""


def why_not_gathered(spec: FeedForwardSpec, weights: FeedForwardWeights) -> str | None:
    """The reason why a feed-forward on a GPU reads all neurons; None: it can read the active ones. Rows that
    the layout by neuron would pad are refused, so that it takes no more bytes than planes.
    """
    if spec.activation not in RELU_ACTIVATIONS:
        return f"its activation is {spec.activation}, which is never exactly zero"
    if spec.sub_norm is not None or (weights.gate_scale, weights.up_scale) != (1, 1):
        return "its neurons have a norm or scales"
    down = weights.ffn_down
    if down.format not in GATHERED_FORMATS:
        return f"{down.name} is {down.format}; gathered are {', '.join(GATHERED_FORMATS)}"
    if down.rows % OUTPUTS_PER_TILE:
        return f"{down.name} has {down.rows} rows, wanted a multiple of {OUTPUTS_PER_TILE}"
    return None


def gathering_bytes(neurons: int, hidden_size: int) -> int:
    """Bytes of the buffers of steps for feed-forwards of at most `neurons`."""
    segments = -(-neurons // GATHERED_SEGMENT)
    listed = segments * GATHERED_SEGMENT
    elements = (listed, segments, MAX_TOKENS * listed, segments * MAX_TOKENS * hidden_size)
    return sum(taken(count, 4) for count in elements)
