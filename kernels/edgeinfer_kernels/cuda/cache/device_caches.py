"""The KV caches on a device: copy to and from the host, and eviction."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgeinfer_kernels.cuda.cache.shift_kernels import slide
from edgeinfer_kernels.cuda.weights.device_model import DeviceModel

Arrays = list[npt.NDArray[np.generic]]


class DeviceCaches:
    """The caches of a model's layers."""

    def __init__(self, model: DeviceModel) -> None:
        self._model = model

    def _first(self, end: int) -> list[Tensor]:
        return [tensor for layer in self._model.layers for tensor in layer.cache.first(end)]

    def copies(self, end: int) -> Arrays:
        """Copies of the first `end` positions, layer by layer."""
        return [tensor.cpu().numpy() for tensor in self._first(end)]

    def put(self, arrays: Sequence[npt.NDArray[np.generic]], end: int) -> None:
        """Restore the arrays that `copies` returned, for `end` positions. Raises `ValueError`: from another
        cache.
        """
        tensors = self._first(end)
        given = [torch.from_numpy(np.array(array[:, :end])) for array in arrays]
        if [(each.shape, each.dtype) for each in given] != [(each.shape, each.dtype) for each in tensors]:
            raise ValueError("these keys and values are of another cache")
        for tensor, array in zip(tensors, given, strict=True):
            tensor.copy_(array)

    def forget(self, gone: npt.NDArray[np.int64], end: int) -> None:
        """Evict positions `gone` (ascending), range by range, the last first; the others up to `end` are
        compacted.
        """
        for stretch in reversed(np.split(gone, np.flatnonzero(np.diff(gone) > 1) + 1)):
            for facts, layer in zip(self._model.specification.layers, self._model.layers, strict=True):
                keep, dropped = int(stretch[0]), len(stretch)
                slide(layer.cache, layer.attention.table, facts.attention, keep, dropped, end)
            end -= len(stretch)
