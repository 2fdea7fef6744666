"""Compiles the kernels of attention with values shorter than keys for a GPU that needn't be there, and prints
their resources.
"""

import sys
from dataclasses import replace

from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.common.rope import RopeSpec
from edgeinfer_kernels.cuda.blocks.attention import take_state
from edgeinfer_kernels.cuda.cache.shift_kernels import ShiftedHeads, shift_context
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.tuning.targets import compile_launch, recorded_launches
from edgeinfer_kernels.layer_cache import CacheType
from tests.kernels.cuda.decode.compile_gemma_kernels import FLOATS, KINDS, POSITIONS, launch_attention

WHOLE = AttentionSpec(
    64, 4, 192, 192**-0.5, NormSpec("rms", 1e-5), RopeSpec((1.0,) * 32, neox=True), value_length=128
)
"""The heads of MiMo-V2."""
WINDOWED = replace(WHOLE, kv_heads=8, window=128, sinks=True)


def launch_shift(spec: AttentionSpec, kind: CacheType) -> None:
    """The kernel of context shift."""
    cache = take_state(Arena(), spec, POSITIONS, kind)
    assert cache is not None
    heads = ShiftedHeads(spec.head_dim, spec.value_dim, has_rope=True)
    shift_context(cache, FLOATS, heads, 4, 1024, POSITIONS)


def main() -> None:
    capability = int(sys.argv[1])
    for kind, spec in zip(KINDS, (WHOLE, WINDOWED, WHOLE), strict=True):
        with recorded_launches() as launches:
            launch_attention(spec, kind, capability)
            launch_shift(spec, kind)
        for launch in launches:
            print(launch.name, kind, compile_launch(launch, capability), flush=True)


if __name__ == "__main__":
    main()
