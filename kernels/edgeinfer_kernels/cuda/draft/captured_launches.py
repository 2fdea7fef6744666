"""Launches of a draft captured as graphs, by their kind."""

from collections.abc import Callable, Hashable, Sequence

import torch

from edgeinfer_kernels.cuda.current_device import capturing

Changed = Callable[[], Sequence[torch.Tensor]]


class CapturedLaunches:
    """Each kind of launches is a graph from its first run on; without CUDA the kernels are launched one by
    one. Before its capture a kind is launched once, which compiles its kernels: it may change only what is
    written again, or what `changed` returns, which is restored.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def run(self, kind: Hashable, launch: Callable[[], None], changed: Changed = tuple) -> None:
        """Run the launches of a kind."""
        if self._device.type == "cuda":
            self._captured(kind, launch, changed).replay()
        else:
            launch()

    def prepare(self, kind: Hashable, launch: Callable[[], None], changed: Changed = tuple) -> None:
        """Capture the launches of a kind, if there is CUDA."""
        if self._device.type == "cuda":
            self._captured(kind, launch, changed)

    def forget(self) -> None:
        """Capture all kinds again from now on."""
        self._graphs.clear()

    def _captured(self, kind: Hashable, launch: Callable[[], None], changed: Changed) -> torch.cuda.CUDAGraph:
        if kind in self._graphs:
            return self._graphs[kind]
        tensors = changed()
        before = [each.clone() for each in tensors]
        launch()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with capturing(self._device, graph):
            launch()
        for each, kept in zip(tensors, before, strict=True):
            each.copy_(kept)
        self._graphs[kind] = graph
        return graph
