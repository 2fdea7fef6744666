"""The norm of a block that shares its input with the one before it, but not the norm."""

from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import quantized_bytes

OWN_INPUT = "own_normed"
"""The buffer of the normed hidden states."""


def own_input_buffers(hidden_size: int) -> dict[str, int]:
    """Bytes per token of the buffers on the CPU."""
    width = padded(hidden_size)
    return {OWN_INPUT: 4 * width, f"{OWN_INPUT}.quantized": quantized_bytes(width)}
