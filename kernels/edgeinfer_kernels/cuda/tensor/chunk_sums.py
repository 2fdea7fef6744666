"""Sums over the ranks of the blocks of a prompt's chunk, in the memory of all ranks.

Columns that are computed are added up on a separate stream, while the next ones are computed.
"""

import torch
from torch import Tensor

from edgeinfer_kernels.cuda.tensor.peer_columns import MAX_PEER_POLLS, sum_columns_kernel
from edgeinfer_kernels.cuda.tensor.peer_memory import PeerRows
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two

PROGRAMS, OVERLAPPED_PROGRAMS = 128, 48
"""Programs of a sum, and of one that overlaps with a product, which needs most of the GPU."""
LOADED = 8192
"""Elements of all ranks' rows that a program loads at once."""
PRODUCT_ELEMENTS = 4 << 20
"""Results that keep all of a large GPU at work: fewer columns of a product at once would slow it down."""


class ChunkSums:
    """Sums of the results of one block after another; all ranks call the same methods in order."""

    def __init__(self, peers: PeerRows, device: torch.device) -> None:
        self._peers, self._device = peers, device
        self._number = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._total: Tensor | None = None
        """The sum that has begun."""
        self._overlaps = False

    def begin(self) -> None:
        """A chunk begins; it has an even number of sums."""
        self._number, self._total = 0, None

    @staticmethod
    def columns_at_once(tokens: int) -> int:
        """Columns of a product whose sum may begin while the next ones are computed."""
        return max(1, PRODUCT_ELEMENTS // tokens)

    def rows(self, tokens: int, scales: Tensor | None) -> Tensor:
        """The buffer for a block's result on this rank, (tokens, columns), to be multiplied by `scales`."""
        own = self._peers.own_scales(self._number)[:tokens]
        if scales is None:
            own.fill_(1.0)
        else:
            own.copy_(scales)
        return self._peers.own(self._number)[:tokens]

    def add_up(self, first: int, count: int, total: Tensor) -> None:
        """Begin to write the sums of these columns of `rows` to `total` (tokens, columns)."""
        self._total, self._overlaps = total, self._stream is not None and count < total.shape[1]
        programs = min(OVERLAPPED_PROGRAMS if self._overlaps else PROGRAMS, self._peers.tokens)
        if self._overlaps:
            assert self._stream is not None
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._launch(programs, first, count, total)
        else:
            self._launch(programs, first, count, total)

    def _launch(self, programs: int, first: int, count: int, total: Tensor) -> None:
        tokens, columns = total.shape
        block = min(next_power_of_two(LOADED // self._peers.ranks), next_power_of_two(count))
        sum_columns_kernel[(programs,)](
            self._peers.args(self._number), columns, first, tokens, total,
            COLUMNS=count, BLOCK=block, POLLS=MAX_PEER_POLLS, num_warps=8,
        )  # fmt: skip

    def has_begun(self, total: Tensor) -> bool:
        """Whether `total` is the sum that has begun."""
        return self._total is total

    def finish(self) -> None:
        """What follows waits for the sum that has begun."""
        if self._overlaps and self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._number, self._total, self._overlaps = self._number + 1, None, False
