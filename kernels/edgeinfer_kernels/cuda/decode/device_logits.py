"""Copies the logits of hidden states on a device to the host."""

import numpy as np
import numpy.typing as npt
import torch

from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
from edgeinfer_kernels.cuda.device_parts import DeviceParts, synchronize
from edgeinfer_kernels.cuda.weights.device_rows import DeviceRows
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS


class DeviceLogits:
    """Logits of a decode step, which are already computed, or of prefill tokens, which are computed on
    demand.
    """

    def __init__(self, parts: DeviceParts, step: DecodeStep, device: torch.device) -> None:
        self._parts = parts
        self._step = step
        self._device = device
        self._cuda = device.type == "cuda"
        self._size = step.model.spec.vocabulary_size
        self._host = torch.zeros(MAX_TOKENS, self._size, pin_memory=self._cuda)

    def of(self, x: DeviceRows) -> npt.NDArray[np.float32]:
        """(rows, vocabulary) float32, newly allocated."""
        return self._of_step(x) if x.in_step else self._of_prompt(x)

    def _of_step(self, x: DeviceRows) -> npt.NDArray[np.float32]:
        """The copy goes to pinned memory that torch reuses when the array is freed. A further copy on the
        host would take as long as the step for eight rows of a large vocabulary.
        """
        out = torch.empty(len(x), self._size, pin_memory=self._cuda)
        out.copy_(self._parts.workspace.logits[x.first : x.first + len(x)], non_blocking=True)
        synchronize(self._device)
        found: npt.NDArray[np.float32] = out.numpy()
        return found

    def _of_prompt(self, x: DeviceRows) -> npt.NDArray[np.float32]:
        """Compute a few rows at a time."""
        space, out = self._parts.workspace, np.empty((len(x), self._size), np.float32)
        for first in range(0, len(x), MAX_TOKENS):
            count = min(MAX_TOKENS, len(x) - first)
            at = x.first + first
            space.x[:count].copy_(self._parts.prefill.x[at : at + count])
            self._step.head_of(count)
            kept = self._host[:count]
            kept.copy_(space.logits[:count], non_blocking=True)
            synchronize(self._device)
            out[first : first + count] = kept.numpy()
        return out
