"""Chunks of a prompt captured as CUDA graphs: a large GPU runs their kernels faster than the host can launch
them.
"""

from collections import OrderedDict
from collections.abc import Callable

import torch

KEPT_COUNTS = 8
"""Token counts that are remembered, with their graphs."""
ChunkKind = tuple[int, bool]
"""Number of tokens, and whether the sequence is in pages of the cache."""


class CapturedChunks:
    """Runs the kernels of chunks; a kind that was run recently is captured, and replayed from then on.

    What differs between chunks of one kind is read from device memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The matrix library has its memory per stream: graphs are captured where chunks run without them.
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: OrderedDict[ChunkKind, torch.cuda.CUDAGraph | None] = OrderedDict()
        """None: run once, without a graph."""

    def run(self, kind: ChunkKind, launch: Callable[[], object]) -> None:
        """Run what `launch` launches for a chunk of this kind."""
        stream, current = self._stream, torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            if kind not in self._graphs:
                launch()
                self._graphs[kind] = None
            else:
                graph = self._graphs[kind] or self._capture(kind, launch)
                graph.replay()
        current.wait_stream(stream)
        self._graphs.move_to_end(kind)
        if len(self._graphs) > KEPT_COUNTS:
            self._graphs.popitem(last=False)

    def _capture(self, kind: ChunkKind, launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Capture a chunk; the kernels are compiled, because the kind was run before."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device at the same time.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()
        self._graphs[kind] = graph
        return graph
