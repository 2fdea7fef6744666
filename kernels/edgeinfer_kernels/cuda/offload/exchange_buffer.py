"""The mailbox between a device and its host, in pinned memory that both reach while a graph runs."""

import torch

from edgeinfer_kernels.backend import BackendError
from edgeinfer_kernels.cpu.cpu_shard import ExchangeRows
from edgeinfer_kernels.cpu.runtime.abi import MAILBOX, MAILBOX_BYTES
from edgeinfer_kernels.layer_cache import padded
from edgeinfer_kernels.specification import DecoderSpecification, ExpertsSpecification

EVERY_TURN = 1 << 30
"""`answered`, where the device shouldn't wait for anybody."""
SENT, ANSWERED, LOST, GIVEN_UP = (at // 8 for at in MAILBOX)


def most_used(specification: DecoderSpecification) -> int:
    """Experts that a token uses in a layer at most."""
    facts = [layer.feed_forward for layer in specification.layers]
    return max((fact.used for fact in facts if isinstance(fact, ExpertsSpecification)), default=0)


class ExchangeBuffer:
    """`words` (MAILBOX) int64; for each of `tokens` a row of x, and the experts that it uses with weights.

    On a device without CUDA (the tests' CPU) it is plain memory.
    """

    def __init__(self, device: torch.device, tokens: int, width: int, used: int) -> None:
        pinned = device.type == "cuda"
        self.words = torch.zeros(MAILBOX_BYTES // 8, dtype=torch.int64, pin_memory=pinned)
        self.rows = torch.zeros((tokens, padded(width)), dtype=torch.float32, pin_memory=pinned)
        self.ids = torch.zeros(tokens * used, dtype=torch.int64, pin_memory=pinned)
        self.weights = torch.zeros(tokens * used, dtype=torch.float32, pin_memory=pinned)
        self._words = self.words.numpy()

    @property
    def addresses(self) -> ExchangeRows:
        """Where the host finds it; it must outlive whoever uses them."""
        return ExchangeRows(
            self.words.data_ptr(),
            self.rows.data_ptr(),
            4 * self.rows.shape[1],
            self.ids.data_ptr(),
            self.weights.data_ptr(),
        )

    def begin(self, answered: int) -> None:
        """Before a step, with turns up to `answered` taken already. The step before has to be over."""
        self._words[[SENT, LOST, GIVEN_UP]] = 0
        self._words[ANSWERED] = answered

    def open(self) -> None:
        """From now on the device waits for nobody: it reads whatever lies there."""
        self.begin(EVERY_TURN)

    def check(self) -> None:
        """After a step. Raises `BackendError`: one side didn't come."""
        if self._words[LOST] or self._words[GIVEN_UP]:
            who = "the GPU" if self._words[GIVEN_UP] else "the CPU"
            raise BackendError(f"{who} didn't come to a hand-over within a minute; load the model again")
