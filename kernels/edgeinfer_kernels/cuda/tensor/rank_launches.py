"""The launches of a decode step that exchange results with the other ranks of tensor parallel."""

from typing import TYPE_CHECKING

from torch import Tensor

from edgeinfer_kernels.cuda.decode.step_norms import Source
from edgeinfer_kernels.cuda.decode.workspace import ROWS
from edgeinfer_kernels.cuda.tensor.logit_kernels import (
    LOGIT_COLUMNS,
    LOGIT_WARPS,
    best_of_ranks_kernel,
    gather_logits_kernel,
)
from edgeinfer_kernels.cuda.tensor.peer_columns import MAX_PEER_POLLS
from edgeinfer_kernels.cuda.tensor.peer_kernels import (
    SUM_COLUMNS,
    SUM_WARPS,
    sum_residual_kernel,
    sum_rows_kernel,
)
from edgeinfer_kernels.cuda.tensor.peer_memory import PeerInboxes
from edgeinfer_kernels.cuda.triton_ops.kernel_args import InboxArgs
from edgeinfer_kernels.cuda.weights.plane_formats import BLOCK

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches


class RankLaunches:
    """Launches the kernels of a rank."""

    def __init__(self, launches: "StepLaunches") -> None:
        self._launches = launches

    def sum_residual(
        self,
        peers: InboxArgs | None,
        y: Tensor,
        scale: float,
        gain: Tensor | None,
        target: Source,
        tokens: int,
    ) -> None:
        """x += scale·the sum of y over the ranks of tensor parallel, or y if there are no `peers`; and x·gain
        to the target.
        """
        out = target.activations
        self._launches.launch(
            sum_residual_kernel,
            (-(-out.blocks * BLOCK // SUM_COLUMNS), tokens),
            peers,
            y,
            y.stride(0),
            self._launches.workspace.x,
            scale,
            self._launches.or_nothing(gain),
            out.words,
            target.sum_squares,
            WIDTH=self._launches.model.spec.hidden_size,
            COLUMNS=SUM_COLUMNS,
            OUT=out.config,
            POLLS=MAX_PEER_POLLS,
            GAIN=gain is not None,
            warps=SUM_WARPS,
        )

    def sum_rows(self, peers: InboxArgs, y: Tensor, tokens: int) -> None:
        """y = its sum over the ranks of tensor parallel."""
        width = self._launches.model.spec.hidden_size
        self._launches.launch(
            sum_rows_kernel,
            (-(-width // SUM_COLUMNS), tokens),
            peers,
            y,
            y.stride(0),
            WIDTH=width,
            COLUMNS=SUM_COLUMNS,
            POLLS=MAX_PEER_POLLS,
            warps=SUM_WARPS,
        )

    def gather_logits(self, peers: PeerInboxes, tokens: int) -> None:
        """logits = those of all ranks of tensor parallel."""
        self._launches.launch(
            gather_logits_kernel,
            (-(-peers.columns // LOGIT_COLUMNS), tokens),
            peers.args,
            self._launches.workspace.own_logits,
            self._launches.workspace.logits,
            self.first_rows,
            VOCABULARY=self._launches.model.vocabulary,
            COLUMNS=LOGIT_COLUMNS,
            POLLS=MAX_PEER_POLLS,
            warps=LOGIT_WARPS,
        )

    def best_of_ranks(self, peers: PeerInboxes, sampled: Tensor, ring: int) -> None:
        """The id of the largest logit of all ranks, as `sample_best_kernel`."""
        space = self._launches.workspace
        self._launches.launch(
            best_of_ranks_kernel,
            (1,),
            peers.args,
            space.best,
            space.best_ids,
            self.first_rows,
            space.state,
            sampled,
            PROGRAMS=self._launches.model.head.shapes.padded_rows // ROWS,
            RING=ring,
            POLLS=MAX_PEER_POLLS,
            warps=8,
        )

    @property
    def first_rows(self) -> tuple[int, ...]:
        """The first row of each rank's part of the head, and the end."""
        part = self._launches.model.part
        assert part is not None, "only ranks of tensor parallel have parts"
        return (*(rows.start for rows in part.vocabulary), part.whole_vocabulary)
