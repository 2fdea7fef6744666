"""The exchange buffer between a device and its host, in pinned memory that both access while a graph runs."""

import torch

from edgeinfer_kernels.backend import BackendError
from edgeinfer_kernels.blocks.moe import MoeSpec
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.cpu_shard import ExchangeRows
from edgeinfer_kernels.cpu.runtime.kernel_args import ANSWERED, EXCHANGE_WORDS, GIVEN_UP, LOST, SENT
from edgeinfer_kernels.decoder import DecoderSpec

EVERY_STAGE = 1 << 30
"""Value of `answered` with which the device never waits."""


def max_experts_per_token(spec: DecoderSpec) -> int:
    """The maximum experts_per_token of all blocks."""
    return max((block.experts_per_token for block in spec.specs(MoeSpec)), default=0)


class ExchangeBuffer:
    """`words` (ExchangeWords) int64; for each of `tokens` tokens a row of x, and its experts with weights.

    On a device without CUDA (the CPU, in tests) it is ordinary memory.
    """

    def __init__(self, device: torch.device, tokens: int, width: int, experts_per_token: int) -> None:
        pinned = device.type == "cuda"
        self.words = torch.zeros(EXCHANGE_WORDS, dtype=torch.int64, pin_memory=pinned)
        self.rows = torch.zeros((tokens, padded(width)), dtype=torch.float32, pin_memory=pinned)
        self.ids = torch.zeros(tokens * experts_per_token, dtype=torch.int64, pin_memory=pinned)
        self.weights = torch.zeros(tokens * experts_per_token, dtype=torch.float32, pin_memory=pinned)
        self._words = self.words.numpy()

    @property
    def addresses(self) -> ExchangeRows:
        """The addresses for the host; the buffer must outlive their users."""
        return ExchangeRows(
            self.words.data_ptr(),
            self.rows.data_ptr(),
            4 * self.rows.shape[1],
            self.ids.data_ptr(),
            self.weights.data_ptr(),
        )

    def begin(self, answered: int) -> None:
        """Reset before a step, with stages up to `answered` already done. The previous step must be
        complete.
        """
        self._words[[SENT, LOST, GIVEN_UP]] = 0
        self._words[ANSWERED] = answered

    def open(self) -> None:
        """From now on the device does not wait; it reads the current content."""
        self.begin(EVERY_STAGE)

    def check(self) -> None:
        """Check after a step. Raises `BackendError`: one side timed out."""
        if self._words[LOST] or self._words[GIVEN_UP]:
            who = "the GPU" if self._words[GIVEN_UP] else "the CPU"
            raise BackendError(f"{who} didn't reach its stage within a minute; load the model again")
