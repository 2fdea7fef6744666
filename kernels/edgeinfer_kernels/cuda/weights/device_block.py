"""A block in device memory: its weights, norms and state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from edgeinfer_kernels.backend import PAGE
from edgeinfer_kernels.caches.cache_types import SCALED_TYPES, CacheType, ElementType, element_types
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.triton_ops.kernel_args import CacheArgs, RecentArgs
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.decoder import BlockIndex, ResidualBlock
from edgeinfer_kernels.sizes.cuda_matrices import recent_device_slots

CACHE_ELEMENTS: dict[ElementType, torch.dtype] = {
    "f16": torch.float16, "fp8": torch.uint8, "q8_0": torch.int8, "q4_0": torch.int32
}  # fmt: skip


class DeviceWeights(Protocol):
    """The weights of a block on the device."""

    @property
    def inputs(self) -> Sequence[DeviceMatrix]:
        """The matrices that are multiplied with the normed hidden states."""
        ...

    @property
    def outputs(self) -> Sequence[DeviceMatrix]:
        """The matrices whose products are added to the hidden states."""
        ...


@dataclass(frozen=True)
class RecentRows:
    """The recent positions of a cache in f16, in the basis of the cache: keys and values (heads, slots · 16,
    width). `slots` (pages,) int32: the slot of each page that has one, the same in all caches of a model.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor


@dataclass(frozen=True)
class DeviceCache:
    """Keys and values of an attention block and their scales (empty without), in the layout of
    `cache_tiles.py`. Of latent attention: the latent vectors, and the keys' elements with RoPE. is_ring:
    position p is at row p % positions. recent: the last positions in f16; None: the type has none.
    """

    keys: Tensor
    key_scales: Tensor
    values: Tensor
    value_scales: Tensor
    is_ring: bool = False
    recent: RecentRows | None = None

    @classmethod
    def take(
        cls,
        arena: Arena,
        heads: int,
        widths: tuple[int, int],
        positions: int,
        kind: CacheType,
        is_ring: bool = False,
        slots: Tensor | None = None,
    ) -> "DeviceCache":
        """Allocate keys and values of these widths; `slots`: as in `RecentRows`."""
        tensors = []
        for width, elements in zip(widths, element_types(kind), strict=True):
            shape = (heads, positions, -(-width // 8) if elements == "q4_0" else width)
            groups = (heads, positions, -(-width // 32)) if elements in SCALED_TYPES else (0,)
            tensors += [arena.take(shape, CACHE_ELEMENTS[elements]), arena.take(groups, torch.float16)]
        keys, key_scales, values, value_scales = tensors
        recent = None
        if slots is not None:
            rows = PAGE * recent_device_slots(PAGE * len(slots))
            of_keys, of_values = (arena.take((heads, rows, width), torch.float16) for width in widths)
            recent = RecentRows(of_keys, of_values, slots)
        return cls(keys, key_scales, values, value_scales, is_ring, recent)

    @property
    def positions(self) -> int:
        """Allocated positions."""
        return int(self.keys.shape[1])

    @property
    def is_four_bit(self) -> bool:
        """Whether keys or values have four bits."""
        return CACHE_ELEMENTS["q4_0"] in (self.keys.dtype, self.values.dtype)

    @property
    def args(self) -> CacheArgs:
        """The arguments of prompt kernels; None for scales that a type doesn't have."""
        key_scales, value_scales = (
            scales if scales.dim() > 1 else None for scales in (self.key_scales, self.value_scales)
        )
        args = CacheArgs(self.keys, key_scales, self.values, value_scales, self.positions)
        return args if self.recent is None else args._replace(recent=self.recent_args)

    @property
    def recent_args(self) -> RecentArgs | None:
        """The recent positions as kernels take them; None: there are none."""
        if self.recent is None:
            return None
        keys, values, slots = self.recent.keys, self.recent.values, self.recent.slots
        return RecentArgs(keys, values, slots, keys.shape[1])

    def head(self, index: int) -> "DeviceCache":
        """The cache of one head."""
        return self._of(lambda tensor: tensor[index : index + 1] if tensor.dim() > 1 else tensor)

    def after(self, positions: int) -> "DeviceCache":
        """The cache after its first positions."""
        return self._of(lambda tensor: tensor[:, positions:] if tensor.dim() > 1 else tensor)

    def copied(self) -> "DeviceCache":
        """A copy in newly allocated memory."""
        return self._of(Tensor.clone)

    def _of(self, part: Callable[[Tensor], Tensor]) -> "DeviceCache":
        """The cache of parts of the tensors, without recent positions."""
        keys, values = part(self.keys), part(self.values)
        return DeviceCache(keys, part(self.key_scales), values, part(self.value_scales), self.is_ring)

    @property
    def nbytes(self) -> int:
        recent = 0 if self.recent is None else self.recent.keys.nbytes + self.recent.values.nbytes
        return int(recent + sum(tensor.nbytes for tensor in self.views(self.positions)))

    def views(self, end: int, slots: Any = ()) -> list[Tensor]:
        """Views of the first `end` positions; the whole ring if it is full."""
        tensors = (self.keys, self.key_scales, self.values, self.value_scales)
        return [tensor[:, :end] for tensor in tensors if tensor.dim() > 1]


@dataclass(frozen=True)
class DeviceNorms:
    """The norms around a block; None if there is none, or not on the device."""

    norm: Tensor | None = None
    norm_bias: Tensor | None = None
    post_norm: Tensor | None = None


@dataclass(frozen=True)
class DeviceBlock:
    """One block of the decoder, or its part on the device. `index`: counted on the device."""

    index: BlockIndex
    residual: ResidualBlock[Any]
    weights: Any
    norms: DeviceNorms
    state: Any = None
    has_granules: bool = True
    """Whether the device has any of its units, if it is divisible."""
