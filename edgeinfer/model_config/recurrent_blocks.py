"""Reads the specifications of recurrent blocks from metadata."""

from collections.abc import Callable

from edgeinfer.model_config.metadata_reader import MetadataReader
from edgeinfer_kernels.blocks.common.block import BlockSpec, NormSpec
from edgeinfer_kernels.blocks.gated_delta_net import GatedDeltaNetSpec
from edgeinfer_kernels.blocks.kimi_delta_attention import KimiDeltaAttentionSpec
from edgeinfer_kernels.blocks.mamba import MambaSpec
from edgeinfer_kernels.blocks.mamba2 import Mamba2Spec
from edgeinfer_kernels.blocks.rwkv7_channel_mix import Rwkv7ChannelMixSpec
from edgeinfer_kernels.blocks.rwkv7_time_mix import Rwkv7TimeMixSpec
from edgeinfer_kernels.blocks.short_convolution import ShortConvolutionSpec
from edgeinfer_kernels.sizes.convolution_sizes import MAX_TAPS

RecurrentReader = Callable[[MetadataReader, int, NormSpec], BlockSpec]
"""(metadata, hidden size, the model's norm) -> specification."""
MAX_HEADS, MAX_STATE = 1 << 12, 1 << 10


def short_convolution(metadata: MetadataReader, hidden_size: int, norm: NormSpec) -> ShortConvolutionSpec:
    """LFM2's short convolution over all elements of the hidden states."""
    return ShortConvolutionSpec(hidden_size, metadata.count("shortconv.l_cache", minimum=2, maximum=MAX_TAPS))


def gated_delta_net(metadata: MetadataReader, hidden_size: int, norm: NormSpec) -> GatedDeltaNetSpec:
    """The gated delta net of Qwen3.5."""
    key_heads = metadata.count("ssm.group_count", maximum=MAX_HEADS)
    value_heads = metadata.count("ssm.time_step_rank", maximum=MAX_HEADS)
    head_dim = metadata.count("ssm.state_size", maximum=MAX_STATE)
    if head_dim % 16:
        raise metadata.refused("ssm.state_size", head_dim, "a multiple of 16")
    if value_heads % key_heads:
        raise metadata.refused("ssm.time_step_rank", value_heads, f"a multiple of {key_heads} key heads")
    width = metadata.count("ssm.inner_size")
    if width != value_heads * head_dim:
        raise metadata.refused("ssm.inner_size", width, f"{value_heads} heads of {head_dim} elements")
    taps = metadata.count("ssm.conv_kernel", minimum=2, maximum=MAX_TAPS)
    return GatedDeltaNetSpec(key_heads, value_heads, head_dim, taps, norm)


def repeated_delta_net(metadata: MetadataReader, hidden_size: int, norm: NormSpec) -> GatedDeltaNetSpec:
    """That of Qwen3-Next, whose adjacent value heads share a key head."""
    spec = gated_delta_net(metadata, hidden_size, norm)
    return GatedDeltaNetSpec(
        spec.key_heads, spec.value_heads, spec.head_dim, spec.taps, norm, repeats_each=True
    )


def kimi_delta_attention(
    metadata: MetadataReader, hidden_size: int, norm: NormSpec
) -> KimiDeltaAttentionSpec:
    """The gated delta net of Kimi Linear, with a decay for each key element."""
    heads = metadata.count("attention.head_count", maximum=MAX_HEADS)
    head_dim = metadata.count("kda.head_dim", maximum=MAX_STATE)
    if head_dim % 16:
        raise metadata.refused("kda.head_dim", head_dim, "a multiple of 16")
    taps = metadata.count("ssm.conv_kernel", minimum=2, maximum=MAX_TAPS)
    return KimiDeltaAttentionSpec(heads, head_dim, taps, norm)


def mamba(metadata: MetadataReader, hidden_size: int, norm: NormSpec) -> MambaSpec:
    """Mamba-1's state space model; that of FalconMamba normalizes dt, B and C."""
    channels = metadata.count("ssm.inner_size", maximum=1 << 20)
    if channels % 16:
        raise metadata.refused("ssm.inner_size", channels, "a multiple of 16")
    return MambaSpec(
        channels,
        metadata.count("ssm.state_size", maximum=MAX_STATE),
        metadata.count("ssm.time_step_rank", maximum=1 << 20),
        metadata.count("ssm.conv_kernel", minimum=2, maximum=MAX_TAPS),
        norm,
        always_normed=metadata.flag("ssm.dt_b_c_rms"),
    )


def mamba2(metadata: MetadataReader, hidden_size: int, norm: NormSpec) -> Mamba2Spec:
    """Mamba-2's state space model."""
    heads = metadata.count("ssm.time_step_rank", maximum=MAX_HEADS)
    groups = metadata.count("ssm.group_count", maximum=MAX_HEADS)
    state_size = metadata.count("ssm.state_size", maximum=MAX_STATE)
    inner_size = metadata.count("ssm.inner_size", maximum=1 << 20)
    if state_size % 16:
        raise metadata.refused("ssm.state_size", state_size, "a multiple of 16")
    if inner_size % (16 * heads):
        raise metadata.refused("ssm.inner_size", inner_size, f"{heads} heads of a multiple of 16 elements")
    if heads % groups:
        raise metadata.refused("ssm.time_step_rank", heads, f"a multiple of {groups} groups")
    taps = metadata.count("ssm.conv_kernel", minimum=2, maximum=MAX_TAPS)
    return Mamba2Spec(heads, inner_size // heads, state_size, groups, taps, norm)


def rwkv7_time_mix(metadata: MetadataReader, hidden_size: int, norm: NormSpec) -> Rwkv7TimeMixSpec:
    """The time mixing of RWKV-7."""
    head_dim = metadata.count("wkv.head_size", maximum=MAX_STATE)
    if head_dim % 16 or hidden_size % head_dim:
        expected = f"a multiple of 16 that divides the hidden size {hidden_size}"
        raise metadata.refused("wkv.head_size", head_dim, expected)
    names = "decay", "iclr", "value_residual_mix", "gate"
    decay, rate, value, gate = (
        metadata.count(f"attention.{name}_lora_rank", maximum=1 << 20) for name in names
    )
    return Rwkv7TimeMixSpec(hidden_size, head_dim, (decay, rate, value, gate))


def rwkv7_channel_mix(metadata: MetadataReader, hidden_size: int, norm: NormSpec) -> Rwkv7ChannelMixSpec:
    """The channel mixing of RWKV-7."""
    return Rwkv7ChannelMixSpec(hidden_size, metadata.count("feed_forward_length", maximum=1 << 24))
