"""Keeps the accepted path of a draft tree: one graph moves its keys, values and hidden states."""

from collections.abc import Sequence

import torch
from torch import Tensor

from edgeinfer_kernels.cpu.runtime.abi import RING_ROWS
from edgeinfer_kernels.cuda.current_device import capturing
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.trees.path_kernels import keep_path_kernel, keep_path_states_kernel
from edgeinfer_kernels.cuda.weights.device_block import DeviceCache
from edgeinfer_kernels.recurrent_state import RecurrentState
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS, PATH_AT

COLUMNS = 256
"""Columns of hidden states that a program moves."""


class PathSteps:
    """Moves the rows of a path in all caches of a model; without CUDA its kernels are launched one by one."""

    def __init__(self, launches: StepLaunches) -> None:
        self._launches = launches
        self._state = launches.workspace.state
        cuda = self._state.is_cuda
        self._words = torch.zeros(1 + MAX_TOKENS, dtype=torch.int32, pin_memory=cuda)
        self._graph: torch.cuda.CUDAGraph | None = None

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """The rows of a path through the last step, which began at position `start`, become the tokens from
        there on.
        """
        if list(rows) == list(range(len(rows))):
            return
        self._words[:] = torch.tensor([start, *rows, *range(len(rows), MAX_TOKENS)], dtype=torch.int32)
        self._state[PATH_AT : PATH_AT + 1 + MAX_TOKENS].copy_(self._words, non_blocking=True)
        if not self._state.is_cuda:
            self.launch()
            return
        if self._graph is None:
            self.warm_up()
        assert self._graph is not None
        self._graph.replay()

    def warm_up(self) -> None:
        """Compile and capture the kernels; a path whose tokens are in place moves nothing."""
        if self._graph is not None or not self._state.is_cuda:
            return
        at = self._state[PATH_AT : PATH_AT + 1 + MAX_TOKENS]
        words = at.clone()
        at[1:] = torch.arange(MAX_TOKENS, dtype=torch.int32, device=at.device)
        self.launch()
        torch.cuda.synchronize(at.device)
        self._graph = torch.cuda.CUDAGraph()
        with capturing(at.device, self._graph):
            self.launch()
        at.copy_(words)

    def launch(self) -> None:
        """Launch the kernels."""
        launches, kept = self._launches, self._launches.workspace.kept
        for block in launches.model.blocks:
            if isinstance(block.state, RecurrentState):
                self._move_rows(block.state.ring[:RING_ROWS])
            elif block.state is not None and block.residual.block.source_layer is None:
                self.move(block.state)
        if kept is not None:
            self._move_rows(kept.rows)

    def _move_rows(self, ring: Tensor) -> None:
        """Launch the kernel of a ring with a row for each position."""
        rows, width = ring.shape
        self._launches.launch(
            keep_path_states_kernel,
            (-(-width // COLUMNS),),
            ring,
            self._state,
            WIDTH=width,
            BLOCK=COLUMNS,
            ROWS=rows,
            warps=4,
        )

    def move(self, cache: DeviceCache) -> None:
        """Launch the kernel of one cache."""
        self._launches.launch(
            keep_path_kernel,
            (len(cache.keys),),
            cache.args,
            self._state,
            KEYS=_width(cache.keys),
            KEY_SCALES=_width(cache.key_scales),
            VALUES=_width(cache.values),
            VALUE_SCALES=_width(cache.value_scales),
            IS_RING=cache.is_ring,
            warps=4,
        )


def _width(tensor: Tensor) -> int:
    """Elements of a row; 0: a cache of this type has no such rows."""
    return int(tensor.shape[2]) if tensor.dim() > 1 else 0
