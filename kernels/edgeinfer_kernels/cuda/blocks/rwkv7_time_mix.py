"""Time mixing: not on a GPU."""

from collections.abc import Sequence
from typing import NoReturn

from edgeinfer_kernels.blocks.rwkv7_time_mix import Rwkv7TimeMixSpec, Rwkv7TimeMixWeights, no_gpu_kernel
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder
from edgeinfer_kernels.stages import Shard


def take(
    builder: DeviceBuilder, spec: Rwkv7TimeMixSpec, w: Rwkv7TimeMixWeights, shards: Sequence[Shard] = ()
) -> NoReturn:
    """Raises `UnsupportedOnDeviceError`: there are no kernels."""
    raise no_gpu_kernel()
