"""Channel mixing: not on a GPU."""

from collections.abc import Sequence
from typing import NoReturn

from edgeinfer_kernels.blocks.rwkv7_channel_mix import Rwkv7ChannelMixSpec, Rwkv7ChannelMixWeights
from edgeinfer_kernels.blocks.rwkv7_time_mix import no_gpu_kernel
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder
from edgeinfer_kernels.stages import Shard


def take(
    builder: DeviceBuilder, spec: Rwkv7ChannelMixSpec, w: Rwkv7ChannelMixWeights, shards: Sequence[Shard] = ()
) -> NoReturn:
    """Raises `UnsupportedOnDeviceError`: there are no kernels."""
    raise no_gpu_kernel()
