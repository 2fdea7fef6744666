"""Decoders that are split between the tested device and the CPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from edgeinfer_kernels.blocks.feed_forward import FeedForwardWeights
from edgeinfer_kernels.blocks.moe import MoeWeights
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.cpu_shard import CpuShard, ShardOptions
from edgeinfer_kernels.cpu.sparse import SparseLayers
from edgeinfer_kernels.cuda.device_parts import DeviceOptions
from edgeinfer_kernels.cuda.offload.exchange_buffer import ExchangeBuffer, max_experts_per_token
from edgeinfer_kernels.cuda.offload.gpu_shard import GpuShard
from edgeinfer_kernels.cuda.tuning.step_shapes import Tuning
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.stages import CPU, stage_blocks
from edgeinfer_offload.runtime.split_backend import SplitBackend
from tests.kernels.cuda.decoders import CONTEXT, SMALL, STEP_TOKENS, Decoder
from tests.kernels.split_layers import LayerSplit, stages_of

CHUNK = 16
CPU_ONLY = LayerSplit(on_gpu=False)
"""The whole layer on the CPU."""


def divisible_weights(decoder: Decoder, index: int) -> Any:
    """The weights of the block of a layer that can be divided, or of its last one."""
    blocks = decoder.specification.layers[index].blocks
    found = [at for at, residual in enumerate(blocks) if residual.block.is_divisible]
    return decoder.weights.layers[index].blocks[found[0] if found else -1].block


def device_layer(decoder: Decoder, index: int) -> LayerSplit:
    """The whole layer on the GPU."""
    last = divisible_weights(decoder, index)
    if isinstance(last, MoeWeights):
        return LayerSplit(True, experts=tuple(range(last.ffn_up_exps.experts)))
    return LayerSplit(True, neurons=last.ffn_up.rows if isinstance(last, FeedForwardWeights) else 0)


@contextmanager
def split_decoder(
    decoder: Decoder,
    device: str,
    splits: Sequence[LayerSplit],
    kernels: Kernels,
    stream_min_tokens: int | None = None,
    meets_in_graph: bool = True,
    kv: CacheType = "f16",
    sparse: SparseLayers | None = None,
    gathered: tuple[int, ...] = (),
    threads: int = 1,
) -> Iterator[SplitBackend]:
    """The decoder's layers, placed by `splits`; `sparse`: those whose part on the CPU is sparse; `gathered`:
    on the GPU.
    """
    spec, weights, target_device = decoder.specification, decoder.weights, torch.device(device)
    stages = stages_of(spec, splits)
    exchange_buffer = ExchangeBuffer(target_device, CHUNK, spec.hidden_size, max_experts_per_token(spec))
    upper = GpuShard(
        spec,
        weights,
        CONTEXT,
        target_device,
        DeviceOptions(
            chunk=CHUNK,
            kv=kv,
            stages=stages,
            stream_min_tokens=stream_min_tokens,
            step_tokens=STEP_TOKENS,
            gathered=gathered,
        ),
        exchange_buffer,
        tuning=Tuning() if device == "cuda" else SMALL,
    )
    options = ShardOptions(CHUNK, threads, sparse=sparse or {})
    here = list(chain.from_iterable(stage_blocks(spec, CPU, stages)))
    state = DecoderState.allocate(spec, CONTEXT, "f32" if kv == "f16" else kv, here)
    host = CpuShard(spec, weights, stages, state, kernels, exchange_buffer.addresses, options)
    upper.serve_with(host, meets_in_graph=meets_in_graph)
    backend = SplitBackend(host, upper)
    try:
        yield backend
    finally:
        backend.close()
