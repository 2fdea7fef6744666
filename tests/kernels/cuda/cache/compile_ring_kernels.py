"""Compiles the kernels that read and write a ring cache for a GPU that needn't be there, and prints their
resources.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from edgeinfer.shapes.shape import Shape
from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.caches.ring_cache import ring_for
from edgeinfer_kernels.cuda.blocks.attention import take_state
from edgeinfer_kernels.cuda.cache.shift_kernels import ShiftedHeads, shift_context
from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.decode.workspace import Workspace
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.prefill.flash_attention import attention_tile, flash_attention
from edgeinfer_kernels.cuda.prefill.prefill_rope import ProjectedHeads, rope_append
from edgeinfer_kernels.cuda.tuning.step_shapes import usual_tuning
from edgeinfer_kernels.cuda.tuning.targets import Launch, compile_launch, recorded_launches
from edgeinfer_kernels.cuda.weights.device_model import DeviceModel
from edgeinfer_kernels.sizes.cuda_buffers import STATE_WORDS
from harness.empty_decoders import empty_decoder
from tests.kernels.cuda.attention_inputs import slots_of
from tests.zoo.ring_layers import with_rings

POSITIONS, TOKENS, WINDOW = 4096, 64, 512
CASES: tuple[tuple[int, CacheType], ...] = ((64, "q8_0"), (128, "f16"), (128, "q4_0"))
"""Elements of a head, and the type of the cache."""


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_prompt(head_dim: int, kind: CacheType, ring: int, capability: int) -> None:
    """The kernels of a chunk of a prompt, and of context shift."""
    spec = AttentionSpec(
        8, 2, head_dim, head_dim**-0.5, NormSpec("rms", 1e-6), None, window=WINDOW, ring=ring
    )
    cache = take_state(Arena(), spec, POSITIONS, kind, slots_of(kind, POSITIONS))
    assert cache is not None
    assert cache.is_ring
    words, queries = tensor(STATE_WORDS, dtype=torch.int32), tensor(TOKENS, 8, head_dim, dtype=torch.float16)
    heads = ProjectedHeads(tensor(TOKENS, 12 * head_dim), tensor(TOKENS))
    table, out = tensor(POSITIONS, head_dim), tensor(TOKENS, 8 * head_dim, dtype=torch.float16)
    rope_append(heads, table, spec, words, queries, cache.args, cache.is_ring)
    tile = attention_tile(head_dim, 4, capability, kind != "f16")
    flash_attention(queries, cache.args, words, spec, out, tile, None, cache.is_ring)
    shift_context(cache, table, ShiftedHeads(head_dim, head_dim, has_rope=True), 4, 1024, POSITIONS)


def launch_step(head_dim: int, kind: CacheType, ring: int, capability: int) -> None:
    """The kernels of a decode step of one token."""
    shape = Shape("small", 1, 8 * head_dim, 256, 8, 2, 1000, POSITIONS, head_dim=head_dim)
    spec, weights = empty_decoder(shape, "Q8_0")
    (layer,) = spec.layers
    attention = replace(layer.blocks[0], block=replace(layer.blocks[0].block, window=WINDOW))
    spec = with_rings(replace(spec, layers=(replace(layer, blocks=(attention, layer.blocks[1])),)), ring)
    arena = Arena()
    model = DeviceModel(spec, weights, arena, POSITIONS, kv=kind)
    launches = StepLaunches(model, Workspace(model, arena), usual_tuning(capability), dependent=False)
    DecodeStep(launches).launch(1)


def launches_of(head_dim: int, kind: CacheType, ring: int, capability: int) -> list[Launch]:
    """The launches that depend on the cache."""
    with recorded_launches() as launches:
        launch_prompt(head_dim, kind, ring, capability)
        launch_step(head_dim, kind, ring, capability)
    names = (
        "rope_append_kernel",
        "flash_attention_kernel",
        "context_shift_kernel",
        "decode_attention_kernel",
    )
    return [launch for launch in launches if launch.name in names]


def compile_cases(cases: Sequence[tuple[int, CacheType]], capability: int) -> None:
    """Compile the kernels of some cases, and print their resources."""
    for head_dim, kind in cases:
        for launch in launches_of(head_dim, kind, ring_for(WINDOW), capability):
            print(launch.name, head_dim, kind, compile_launch(launch, capability), flush=True)


def main() -> None:
    compile_cases(CASES, int(sys.argv[1]))


if __name__ == "__main__":
    main()
