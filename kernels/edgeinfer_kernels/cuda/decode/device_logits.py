"""Hidden states that stay on the device, and copies of their logits to the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
from edgeinfer_kernels.cuda.device_parts import DeviceParts, synchronize
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS


@dataclass(frozen=True)
class DeviceRows:
    """Hidden states after the last layer, on the device; `logits` reads them there."""

    first: int
    count: int
    in_step: bool
    """Whether they are of a decode step, whose logits are already computed."""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, part: slice) -> "DeviceRows":
        start, stop, _ = part.indices(self.count)
        return DeviceRows(self.first + start, stop - start, self.in_step)


class DeviceLogits:
    """Logits of a decode step, which are already computed, or of prefill tokens, which are computed on
    demand.
    """

    def __init__(self, parts: DeviceParts, step: DecodeStep, device: torch.device) -> None:
        self._parts = parts
        self._step = step
        self._device = device
        self._cuda = device.type == "cuda"
        self._size = step.model.vocabulary
        self._host = torch.zeros(MAX_TOKENS, self._size, pin_memory=self._cuda)
        self._collected: Tensor | None = None

    def of(self, x: DeviceRows) -> npt.NDArray[np.float32]:
        """(rows, vocabulary) float32, newly allocated."""
        if self._collected is not None:
            collected: npt.NDArray[np.float32] = self._collected[x.first : x.first + x.count].numpy()
            return collected
        return self._of_step(x) if x.in_step else self._of_prompt(x)

    @property
    def are_collected(self) -> bool:
        """Whether the logits of a batch are those of several steps, and no longer on the device."""
        return self._collected is not None

    def forget(self) -> None:
        """Another step begins."""
        self._collected = None

    def collect(self, rows: Sequence[int], total: int) -> None:
        """Keep the logits of a step as these `rows` of the `total` rows of a batch of several steps."""
        if self._collected is None:
            self._collected = torch.empty(total, self._size)
        self._collected[list(rows)] = self._parts.workspace.logits[: len(rows)].cpu()

    def _of_step(self, x: DeviceRows) -> npt.NDArray[np.float32]:
        """The copy goes to pinned memory that torch reuses when the array is freed. A further copy on the
        host would take as long as the step for eight rows of a large vocabulary.
        """
        out = torch.empty(len(x), self._size, pin_memory=self._cuda)
        out.copy_(self._parts.workspace.logits[x.first : x.first + len(x)], non_blocking=True)
        synchronize(self._device)
        logits: npt.NDArray[np.float32] = out.numpy()
        return logits

    def _of_prompt(self, x: DeviceRows) -> npt.NDArray[np.float32]:
        """Compute some rows at a time."""
        space, out = self._parts.workspace, np.empty((len(x), self._size), np.float32)
        for first in range(0, len(x), MAX_TOKENS):
            count = min(MAX_TOKENS, len(x) - first)
            at = x.first + first
            space.x[:count].copy_(self._parts.prefill.x[at : at + count])
            self._step.head_of(count)
            pinned = self._host[:count]
            pinned.copy_(space.logits[:count], non_blocking=True)
            synchronize(self._device)
            out[first : first + count] = pinned.numpy()
        return out
