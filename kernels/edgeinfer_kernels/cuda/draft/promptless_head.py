"""The base of draft heads on a GPU that process no prompts: Medusa heads and Gemma 4 assistants."""

from abc import ABC, abstractmethod

import torch

from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.current_device import current
from edgeinfer_kernels.cuda.decode.workspace import Workspace
from edgeinfer_kernels.cuda.device_memory import Arena, Uploader
from edgeinfer_kernels.cuda.device_parts import SamplingSpace
from edgeinfer_kernels.cuda.draft.target import HeadTarget
from edgeinfer_kernels.cuda.weights.device_model import DeviceModel
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights


class HeadParts:
    """All device allocations, in order; either counted or made."""

    def __init__(
        self,
        specification: DecoderSpec,
        weights: DecoderWeights,
        context: int,
        arena: Arena,
        target: HeadTarget,
        kv: CacheType = "f16",
    ) -> None:
        self.model = DeviceModel(specification, weights, arena, context, target=target, kv=kv)
        self.workspace = Workspace(self.model, arena)
        self.sampling = SamplingSpace(self.model.vocabulary, arena)


class PromptlessHead(ABC):
    """A head on the GPU of its target. All memory is allocated in the constructor.

    Raises:
        UnsupportedOnDeviceError: a matrix without a kernel.
        DeviceMemoryError: the device has less memory than is counted.
    """

    def _load(
        self,
        specification: DecoderSpec,
        weights: DecoderWeights,
        context: int,
        device: torch.device,
        target: HeadTarget,
        kv: CacheType = "f16",
    ) -> HeadParts:
        """Allocate everything, and load the weights."""
        self.device = device
        self._cuda = device.type == "cuda"
        with current(device):
            counting = Arena()
            HeadParts(specification, weights, context, counting, target, kv)
            self._arena = Arena(device, counting.used)
            parts = HeadParts(specification, weights, context, self._arena, target, kv)
            uploader = Uploader(device)
            try:
                parts.model.fill(uploader)
            finally:
                uploader.close()
        return parts

    @property
    def nbytes(self) -> int:
        """Bytes allocated on the device."""
        return self._arena.used

    @abstractmethod
    def warm_up(self) -> None:
        """Compile the kernels, and capture usual drafts."""

    @abstractmethod
    def _drop(self) -> None:
        """Drop what refers to the device memory."""

    def close(self) -> None:
        """Free the device memory."""
        with current(self.device):
            self._drop()
            self._arena.close()
