"""Each block kind on a GPU, in a module of the kind's name.

A module has `PART` (the name of the weights), `take` and `take_state` (allocate), `inactive_bytes`,
`has_granules` if it is divisible, `shift` if its state has positions, `Space` (the buffers of a decode step),
`decode` and `prefill`. `waits_for_host`: whether the host takes part in the prefill of a chunk. With
`before_layer_decode` and `before_layer_prefill` a block runs something before the first block of its layer.
`oldest_capability`: ten times the compute capability that a block needs, if not every GPU has that. With
`NORMALIZES_INPUT` its kernels read x and apply the norm before the block. With `EMBEDS` the first block
reads the embedding of tokens instead of x.
"""

from importlib import import_module
from typing import Any


def device_module(kind: str) -> Any:
    """The module of a block kind."""
    return import_module(f"{__name__}.{kind}")


def normalizes_input(kind: str) -> bool:
    """Whether the kernels of a block kind read x and apply the norm before the block."""
    return getattr(device_module(kind), "NORMALIZES_INPUT", False)
