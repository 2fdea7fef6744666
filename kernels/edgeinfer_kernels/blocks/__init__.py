"""The kinds of blocks that layers are built of: specification, weights, sizes and state; no backend."""

BLOCK_KINDS = ("attention", "feed_forward", "moe")
"""The module of each kind here, and in `blocks` of every backend."""
