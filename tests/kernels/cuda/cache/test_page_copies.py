"""Cache pages that are copied between a device and main memory: the bytes of all tensors, and no others."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from edgeinfer_kernels.backend import PAGE
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.cache import page_copies
from edgeinfer_kernels.cuda.cache.page_copies import PageCopies
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.weights.device_block import DeviceCache

POSITIONS = 7 * PAGE
SHAPES = {
    "heads of 64": [(3, (64, 64))] * 2,
    "odd heads": [(2, (24, 40)), (1, (72, 8))],
    "latent": [(1, (96, 32))],
}
KINDS: tuple[CacheType, ...] = ("f16", "fp8", "q8_0", "q4_0", "q8_0/q4_0")


def caches(device: str, shapes: Sequence[tuple[int, tuple[int, int]]], kind: CacheType) -> list[Tensor]:
    """The tensors of some blocks, (heads, pages, …), with other tensors between them, in random memory."""

    def take(arena: Arena) -> list[Tensor]:
        tensors = list[Tensor]()
        for index, (heads, widths) in enumerate(shapes):
            arena.take((100 * index + 1,), torch.int32)
            tensors += DeviceCache.take(arena, heads, widths, POSITIONS, kind).views(POSITIONS)
        arena.take((5,), torch.int32)
        return tensors

    counting = Arena()
    take(counting)
    tensors = take(Arena(torch.device(device), counting.used))
    everything = memory_of(tensors)
    everything.copy_(torch.randint(0, 256, everything.shape, dtype=torch.uint8))
    return [tensor.view(len(tensor), -1, PAGE, *tensor.shape[2:]) for tensor in tensors]


def memory_of(tensors: Sequence[Tensor]) -> Tensor:
    """All bytes of the allocation."""
    return torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(tensors[0].untyped_storage())


def page_of(tensors: Sequence[Tensor], page: int) -> list[int]:
    return [
        byte for each in tensors for byte in each[:, page].contiguous().view(torch.uint8).flatten().tolist()
    ]


@pytest.mark.default_cases(5)
@pytest.mark.parametrize("slice_bytes", [1, 1 << 9, 1 << 20])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_pages_are_read_and_written_with_all_their_bytes_and_no_others(
    device: str, monkeypatch: pytest.MonkeyPatch, shape: str, kind: CacheType, slice_bytes: int
) -> None:
    monkeypatch.setattr(page_copies, "SLICE_BYTES", slice_bytes)
    tensors = caches(device, SHAPES[shape], kind)
    before, pages, targets = memory_of(tensors).cpu().clone(), [5, 0, 3], [1, 6, 5]
    copies = PageCopies(tensors)
    contents = copies.read(pages)
    assert [part.tolist() for part in contents] == [page_of(tensors, page) for page in pages]
    assert {part.nbytes for part in contents} == {copies.nbytes}
    np.testing.assert_array_equal(memory_of(tensors).cpu(), before)

    copies.write(targets, contents)
    assert [page_of(tensors, page) for page in targets] == [part.tolist() for part in contents]
    after, values = memory_of(tensors).cpu().clone(), [tensor[:, targets] for tensor in tensors]
    memory_of(tensors).copy_(before)
    for tensor, value in zip(tensors, values, strict=True):
        tensor[:, targets] = value
    np.testing.assert_array_equal(memory_of(tensors).cpu(), after)


def test_contents_do_not_change_with_what_is_read_later(device: str) -> None:
    tensors = caches(device, SHAPES["odd heads"], "q8_0")
    copies = PageCopies(tensors)
    (first,) = copies.read([2])
    held = first.copy()
    copies.read([4, 1])
    np.testing.assert_array_equal(first, held)


def test_a_device_without_caches_has_pages_of_no_bytes() -> None:
    copies = PageCopies([])
    contents = copies.read([0, 3])
    assert [part.nbytes for part in contents] == [0, 0]
    copies.write([1, 2], contents)
