"""What the steps and prompts of a rank of tensor parallel need of the other ranks."""

from typing import Protocol

from torch import Tensor

from edgeinfer_kernels.cuda.tensor.chunk_sums import ChunkSums
from edgeinfer_kernels.cuda.tensor.peer_memory import PeerInboxes


class Collective(Protocol):
    """What a rank's step and prompts need of the other ranks. All ranks call the same methods in order."""

    rank: int
    peers: PeerInboxes | None
    """With them the kernel that adds a result to x adds it up over the ranks; None: `sum_of_step` does."""
    logit_peers: PeerInboxes | None
    """Those for logits; None: `gather` gathers them."""

    def shared(self, rows: Tensor, logits: int) -> Tensor:
        """A buffer of the shape of `rows` whose sums are the fastest; may be `rows` itself. Sets `peers` and
        `logit_peers`; a rank has up to `logits` of each row.
        """
        ...

    def sum_of_step(self, rows: Tensor) -> Tensor:
        """The sum over the ranks of the first rows of a `shared` buffer."""
        ...

    def chunk_sums(self, tokens: int, columns: int) -> ChunkSums | None:
        """What adds up the results of chunks of up to `tokens`; None: `add_up`."""
        ...

    def add_up(self, rows: Tensor) -> None:
        """rows = their sum over the ranks."""
        ...

    def gather(self, own: Tensor, gathered: Tensor) -> None:
        """gathered = the elements `own` of each rank, one rank after another; all have the same number."""
        ...


class Alone:
    """A collective that exchanges nothing, for measurements of one rank: they take another number of steps on
    each.
    """

    rank = 0

    def __init__(self, peers: PeerInboxes | None = None, logit_peers: PeerInboxes | None = None) -> None:
        self.peers, self.logit_peers = peers, logit_peers

    def shared(self, rows: Tensor, logits: int) -> Tensor:
        return rows

    def sum_of_step(self, rows: Tensor) -> Tensor:
        return rows

    def chunk_sums(self, tokens: int, columns: int) -> ChunkSums | None:
        """Nothing is added up."""

    def add_up(self, rows: Tensor) -> None:
        """There are no other ranks."""

    def gather(self, own: Tensor, gathered: Tensor) -> None:
        """As `add_up`."""
