"""The states that a draft head on a GPU keeps at the tokens it drafts, for its next step."""

from typing import ClassVar

import torch

from edgeinfer_kernels.cuda.device_memory import Arena


class OwnStates:
    """Base of the buffers of a head's input.

    `own`: row 0 is the state at the last token of the text, or of a draft that is a chain, the others those
    at the tokens of a tree's step; of several heads, row i is that of head i at its last token. `reads_own`:
    the next step reads them, as it continues a draft. `raw`: they are those after the layer, else after the
    head's norm.
    """

    stays: ClassVar[bool] = False
    """Whether the tokens of a draft are all processed at the same position."""

    def __init__(self, arena: Arena, tokens: int, width: int, *, raw: bool) -> None:
        self.raw = raw
        self.own = arena.take((1 + tokens, width), torch.float32)
        self.reads_own = False
