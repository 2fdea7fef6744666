"""Bytes that a plan needs besides the weights: buffers, caches, pinned memory and the driver."""

from functools import cached_property

from edgeinfer_kernels.caches.cache_types import has_recent
from edgeinfer_kernels.caches.layer_cache import padded, pool_positions
from edgeinfer_kernels.cuda.weights.plane_formats import STREAMED
from edgeinfer_kernels.sizes import cuda_buffers
from edgeinfer_kernels.sizes.cpu_workspace import scratch_stride, workspace_bytes
from edgeinfer_kernels.sizes.gathered_neurons import gathering_bytes
from edgeinfer_kernels.sizes.model_sizes import LayerSizes, ModelSizes
from edgeinfer_offload.machine.cost_constants import LIBRARY_BYTES
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.planner.layer_costs import Pricing
from edgeinfer_offload.planner.placement_search import GPU
from edgeinfer_offload.planner.plan_types import PlanOptions
from edgeinfer_offload.planner.sparse_types import SparseOptions

STAGING_BYTES = 24 << 20
"""Pinned main memory for copying weights to the GPU."""


class BufferSizes:
    """Bytes of the buffers and caches of one model on one machine with one set of options."""

    def __init__(
        self,
        sizes: ModelSizes,
        machine: Machine,
        options: PlanOptions,
        pricing: Pricing,
        sparse: SparseOptions,
    ) -> None:
        self._sizes, self._machine, self._options = sizes, machine, options
        self._pricing, self._sparse = pricing, sparse

    @property
    def streams(self) -> bool:
        """Whether prefill may stream CPU weights to the GPU: not if some are on disk, have adapters, or
        are of a format whose layout on the CPU no GPU kernel decodes; nor with recent positions, whose steps
        are short.
        """
        if has_recent(self._options.kv):
            return False
        if self._options.disk or self._options.lora is not None or not self._sizes.formats <= set(STREAMED):
            return False
        known = self._machine.link is not None and self._machine.link.to_gpu < float("inf")
        return known and self._pricing.graphics is not None and self._options.device == "any"

    @cached_property
    def gpu_workspace(self) -> int:
        """Bytes of the buffers at the largest batch, and of the RoPE tables."""
        positions = pool_positions(self._options.context, self._options.sequences)
        rope = self._sizes.rope_device_bytes(positions)
        options = self._options
        nbytes = rope + cuda_buffers.workspace_bytes(self._sizes, positions, options.chunk, options.kv)
        gathered = [self._sizes.layers[layer].divisible for layer in self._sparse.gathered]
        neurons = max((block.granules for block in gathered if block), default=0)
        return nbytes + (gathering_bytes(neurons, self._sizes.hidden_size) if neurons else 0)

    @cached_property
    def cpu_workspace(self) -> int:
        """Bytes of the buffers at the largest batch."""
        return self.cpu_workspace_for(self._options.batch)

    def cpu_workspace_for(self, batch: int) -> int:
        """Bytes of the buffers for steps of `batch` tokens."""
        threads, sparse = self._machine.processor.threads, self._options.sparse
        repack = self._options.repack and sparse is None  # long steps of sparse layers read the mapped file
        nbytes = workspace_bytes(self._sizes, batch, threads, repack)
        return nbytes + (sparse.shared_bytes + threads * sparse.thread_bytes if sparse else 0)

    @property
    def file_rows_bytes(self) -> int:
        """Additional buffer bytes if some of the CPU's weights stay memory-mapped."""
        strides = [scratch_stride(self._sizes, repack) for repack in (False, True)]
        return self._machine.processor.threads * (strides[0] - strides[1]) if self._options.repack else 0

    def context_bytes(self, device_index: int, context: int) -> int:
        """Bytes that grow with the context: keys and values, and RoPE tables on a GPU."""
        blocks, kv = self._sizes.blocks, self._pricing.kv
        if device_index == GPU:
            sequences = self._options.sequences
            states = sum(block.states_device_bytes(context, sequences, kv) for block in blocks)
            return states + self._sizes.rope_device_bytes(pool_positions(context, sequences))
        return self._options.sequences * sum(block.state_bytes(context, kv) for block in blocks)

    def context_bytes_of(self, layer: LayerSizes) -> int:
        """Bytes of the state of one layer on the CPU."""
        context, kv = self._options.context, self._pricing.kv
        return self._options.sequences * sum(block.state_bytes(context, kv) for block in layer.blocks)

    def staging(self, shared: bool) -> int:
        """Pinned main memory for weight copies and for the logits. If the model is `shared` between CPU and
        GPU, also the exchange buffer and the prefill buffers.
        """
        logits = 4 * cuda_buffers.MAX_TOKENS * padded(self._sizes.vocabulary)
        exchange = cuda_buffers.exchange_buffer_bytes(self._sizes, self._options.batch) if shared else 0
        return STAGING_BYTES + logits + exchange + (self._pinned_ring if shared else 0)

    @property
    def _pinned_ring(self) -> int:
        """Bytes of the pinned ring for streamed weights that can't be pinned in place."""
        link = self._machine.link
        if not self.streams or link is None or link.pins_in_place:
            return 0
        return cuda_buffers.STREAMED_PIECES * cuda_buffers.streamed_piece_bytes(self._sizes)

    def streamed_bytes(self, host_attends: bool) -> int:
        """GPU bytes used for streaming weights; `host_attends`: of layers with attention on the CPU too."""
        context = self._options.context
        return cuda_buffers.streaming_bytes(self._sizes, context, host_attends) if self.streams else 0

    @cached_property
    def gpu_fixed(self) -> int:
        """GPU bytes that do not depend on the placement."""
        lora = self._options.lora.gpu_bytes if self._options.lora else 0
        return self.gpu_workspace + LIBRARY_BYTES + self.driver_bytes + lora

    @property
    def min_gpu_bytes(self) -> int:
        """GPU bytes that any use of the GPU takes before the first weight."""
        return self.gpu_fixed + self.streamed_bytes(host_attends=False)

    @property
    def driver_bytes(self) -> int:
        """Bytes of free GPU memory that the driver itself will take."""
        return self._pricing.graphics.context_bytes if self._pricing.graphics else 0
