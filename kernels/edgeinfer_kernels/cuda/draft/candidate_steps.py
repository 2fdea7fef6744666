"""Launches that find the most probable tokens after rows of logits, in memory that the host reads."""

import torch

from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.device_parts import SamplingSpace
from edgeinfer_kernels.cuda.draft.tree_kernels import (
    CANDIDATES,
    level_candidates_kernel,
    level_slices_kernel,
)
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS


class CandidateSteps:
    """The candidates after rows of the logits in a workspace."""

    def __init__(self, launches: StepLaunches, sampling: SamplingSpace) -> None:
        self._launches, self._buffers = launches, sampling.buffers
        cuda, shape = launches.workspace.state.is_cuda, (MAX_TOKENS, CANDIDATES.value)
        self._ids = torch.zeros(shape, dtype=torch.int32, pin_memory=cuda)
        self._probs = torch.zeros(shape, dtype=torch.float32, pin_memory=cuda)

    def launch(self, rows: int, *, last: bool = False) -> None:
        """Find those of the first rows, or of the step's last one."""
        launches, buffers = self._launches, self._buffers
        space, model = launches.workspace, launches.model
        vocabulary, slices = model.spec.vocabulary_size, buffers.keys.shape[1]
        found = (buffers.keys, buffers.masses)
        launches.launch(
            level_slices_kernel,
            (slices, rows),
            space.logits,
            space.state,
            *found,
            vocabulary,
            SLICE=buffers.slice,
            LAST=last,
            warps=4,
        )
        launches.launch(
            level_candidates_kernel,
            (rows,),
            *found,
            space.state,
            launches.or_nothing(model.output_ids),
            self._ids,
            self._probs,
            vocabulary,
            slices,
            SLICES=next_power_of_two(slices),
            MAPPED=model.output_ids is not None,
            warps=4,
        )

    def found(self, rows: int, count: int) -> list[list[tuple[int, float]]]:
        """The `count` most probable tokens of each row, and their probabilities, falling; the launches are
        complete.
        """
        ids, probs = self._ids[:rows, :count].tolist(), self._probs[:rows, :count].tolist()
        return [list(zip(*each, strict=True)) for each in zip(ids, probs, strict=True)]
