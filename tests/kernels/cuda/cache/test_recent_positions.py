"""Recent positions in f16 next to a cache of fewer bits, on a device: every token reads them, in each kind of
step.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from edgeinfer_kernels.backend import PAGE, BatchPositions
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.cache.recent_positions import DeviceRecentPages, as_floats
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.weights.device_block import DeviceCache
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from tests.kernels.cpu.test_cpu_backend import cpu
from tests.kernels.cuda.cache.test_ring_caches import ring_and_whole
from tests.kernels.cuda.decoders import (
    CONTEXT,
    FLOATS_AGREE,
    Decoder,
    Logits,
    opened,
    read,
    sample_greedy,
    worst,
)
from tests.model_zoo import ZOO

FOUR_BITS: CacheType = "q4_0+f16"
COUNTS = (16, 16, 13, 8, 1, 3)
"""Chunks and steps; tokens of one step are on both sides of a page."""
LAYERS = {"llama": (0, 1), "deepseek2": (0, 1), "gemma3": (4, 5), "gpt-oss": (0, 1), "bloom": (0,)}
SAME_CODES = 0.06
"""Keys and values near the middle of two codes get either on another device."""


def of_cpu(decoder: Decoder, kind: CacheType, ids: list[int]) -> dict[int, Logits]:
    """As `read` with COUNTS, of the CPU's backend."""
    state = DecoderState.allocate(decoder.specification, CONTEXT, kind)
    backend, rows, at = cpu()(decoder.specification, decoder.weights, state), dict[int, Logits](), 0
    for count in COUNTS:
        x = backend.embed(ids[at : at + count])
        backend.forward(x, at)
        last = min(count, 2)
        logits = np.asarray(backend.logits(x[count - last :]), np.float64)
        at += count
        rows |= {at - last + row: each for row, each in enumerate(logits)}
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek2", "gemma3", "gpt-oss", "bloom"])
def test_with_all_positions_in_f16_nothing_changes(device: str, tmp_path: Path, name: str) -> None:
    with opened(ZOO[name], tmp_path, LAYERS[name]) as decoder:
        ids, results = decoder.ids(64), []
        for kind in ("f16", "f16+f16"):
            backend = decoder.backend(device, kv=kind)
            assert backend.nbytes == decoder.counted_bytes(device, kv=kind)
            results.append(read(backend, ids, COUNTS))
            backend.close()
        plain, recent = results
        distances = [np.linalg.norm(recent[at] - row) / np.linalg.norm(row) for at, row in plain.items()]
        assert max(distances) < FLOATS_AGREE


@pytest.mark.slow
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("kind", [FOUR_BITS, "q8_0/q4_0+f16", "fp8+f16"])
@pytest.mark.parametrize("name", ["llama", "deepseek2"])
def test_logits_equal_those_of_the_cpu_and_are_exact_while_all_positions_are_recent(
    device: str, tmp_path: Path, name: str, kind: CacheType
) -> None:
    with opened(ZOO[name], tmp_path, LAYERS[name]) as decoder:
        ids = decoder.ids(64)
        backend = decoder.backend(device, kv=kind)
        result = read(backend, ids, COUNTS)
        backend.close()
        expected, truth = of_cpu(decoder, kind, ids), decoder.reference_logits(ids)
        for at, row in result.items():
            near = np.linalg.norm(row - expected[at]) / np.linalg.norm(expected[at])
            assert near < SAME_CODES
        assert worst({at: row for at, row in result.items() if at < 3 * PAGE}, truth) < 2 * FLOATS_AGREE


@pytest.mark.slow
def test_a_ring_has_the_recent_positions_of_a_whole_cache(device: str, tmp_path: Path) -> None:
    results = []
    with ring_and_whole("windows", tmp_path) as decoders:
        for decoder in decoders:
            backend = decoder.backend(device, kv=FOUR_BITS)
            assert backend.nbytes == decoder.counted_bytes(device, kv=FOUR_BITS)
            results.append((read(backend, decoder.ids(63), COUNTS), backend.nbytes))
            backend.close()
        sizes = [ModelSizes.of(decoder.specification, decoder.weights) for decoder in decoders]
    (ring, ring_bytes), (whole, whole_bytes) = results
    for at, row in ring.items():
        np.testing.assert_array_equal(row, whole[at])
    planned = [sum(block.state_device_bytes(CONTEXT, FOUR_BITS) for block in each.blocks) for each in sizes]
    assert planned[1] - planned[0] == whole_bytes - ring_bytes


@pytest.mark.slow
def test_rewinds_keep_the_recent_positions(device: str, tmp_path: Path) -> None:
    with opened(ZOO["llama"], tmp_path, LAYERS["llama"]) as decoder:
        ids, results = decoder.ids(64), []
        for is_rewound in (False, True):
            backend = decoder.backend(device, kv=FOUR_BITS)
            read(backend, ids, (16, 16, 16, 5))
            if is_rewound:
                read(backend, ids, (8,), start=53)
            results.append(read(backend, ids[53:], (1, 2, 1), start=53))
            backend.close()
        for at, row in results[0].items():
            np.testing.assert_array_equal(results[1][at], row)


def after(backend: CudaBackend, ids: list[int], start: int) -> dict[int, Logits]:
    return read(backend, ids[:5], (1, 3, 1), start=start)


def test_shifted_texts_and_restored_snapshots_continue_alike_from_four_bits(
    device: str, tmp_path: Path
) -> None:
    with opened(ZOO["llama"], tmp_path, LAYERS["llama"]) as decoder:
        ids = decoder.ids(64)
        backend, other = (decoder.backend(device, kv=FOUR_BITS) for _ in range(2))
        read(backend, ids, (16, 16, 16, 8))
        backend.evict(np.arange(3, 20), 56)
        read(other, ids[5:], (16, 16, 16))
        other.restore([array.copy() for array in backend.snapshot(39)], 39)
        expected = after(backend, ids[56:], 39)
        for at, row in after(other, ids[56:], 39).items():
            np.testing.assert_array_equal(row, expected[at])
        backend.close()
        other.close()


@pytest.mark.slow
def test_samples_started_ahead_have_their_recent_positions(device: str, tmp_path: Path) -> None:
    start, count = 28, 8
    with opened(ZOO["llama"], tmp_path, (0,)) as decoder:
        ids, results = decoder.ids(start), []
        for is_ahead in (False, True):
            backend, sampled = decoder.backend(device, kv=FOUR_BITS), [3]
            read(backend, ids, (16, 12))
            for position in range(start, start + count):
                sampled.append(sample_greedy(backend, sampled[-1], position, is_ahead))
            results.append(sampled)
            backend.close()
        assert results[0] == results[1]


@pytest.mark.slow
def test_sequences_in_one_step_equal_each_alone(device: str, tmp_path: Path) -> None:
    """Of 33 and 30 tokens; the second one's pages are not in order."""
    tables = np.array([[0, 1, 4], [3, 2, 3]])
    with opened(ZOO["llama"], tmp_path, LAYERS["llama"]) as decoder:
        ids, lengths = decoder.ids(64), (32, 29)
        texts = [ids[:33], ids[33:63]]
        expected = []
        for text, length in zip(texts, lengths, strict=True):
            alone = decoder.backend(device, kv=FOUR_BITS)
            result = read(alone, text, (16, length - 16, 1), expected=1)
            expected.append(result[length])
            alone.close()
        backend = decoder.backend(device, kv=FOUR_BITS)
        for text, length, table in zip(texts, lengths, tables, strict=True):
            for first, last in ((0, 16), (16, length)):
                pages = np.broadcast_to(table[:2], (last - first, 2))
                positions = BatchPositions(np.arange(first, last), pages)
                backend.forward_batch(backend.embed(text[first:last]), positions)
        x = backend.embed([text[-1] for text in texts])
        backend.forward_batch(x, BatchPositions(np.array(lengths), tables))
        for row, alone_row in zip(backend.logits(x).astype(np.float64), expected, strict=True):
            assert np.linalg.norm(row - alone_row) / np.linalg.norm(alone_row) < FLOATS_AGREE
        backend.close()


def test_trees_of_drafts_are_chains(device: str, tmp_path: Path) -> None:
    with opened(ZOO["llama"], tmp_path, (0,)) as decoder:
        backend = decoder.backend(device, kv=FOUR_BITS)
        assert backend.capabilities.max_tree_tokens == 0
        backend.close()


HEADS, WIDTHS, POSITIONS = 2, (24, 40), 1024


def filled_cache(kind: CacheType, slots: torch.Tensor, is_ring: bool) -> DeviceCache:
    """A cache with random bits, and finite scales."""
    random = torch.Generator().manual_seed(6)
    positions = 128 if is_ring else POSITIONS
    arena = Arena(torch.device("cpu"), 1 << 21)
    cache = DeviceCache.take(arena, HEADS, WIDTHS, positions, kind, is_ring, slots)
    for tensor in (cache.keys, cache.values):
        bits = torch.randint(0, 120, (tensor.nbytes,), generator=random, dtype=torch.uint8)
        tensor.copy_(bits.view(tensor.dtype).view(tensor.shape))
    for scales in (cache.key_scales, cache.value_scales):
        scales.copy_(torch.rand(scales.shape, generator=random))
    return cache


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("is_ring", [False, True])
@pytest.mark.parametrize("kind", ["f16", "fp8", "q8_0", "q4_0", "q8_0/q4_0"])
def test_pages_without_a_slot_are_filled_from_the_cache(kind: CacheType, is_ring: bool) -> None:
    slots = torch.zeros(POSITIONS // PAGE, dtype=torch.int32)
    cache = filled_cache(kind, slots, is_ring)
    pages = DeviceRecentPages([cache], slots)
    pages.touch(900, 1)
    assert cache.recent is not None
    for page in (54, 55, 56):
        at = int(slots[page]) * PAGE
        first = page * PAGE % cache.positions
        for tensor, scales, recent in (
            (cache.keys, cache.key_scales, cache.recent.keys),
            (cache.values, cache.value_scales, cache.recent.values),
        ):
            own = scales[:, first : first + PAGE] if scales.dim() > 1 else None
            floats = as_floats(tensor[:, first : first + PAGE], own, recent.shape[2])
            torch.testing.assert_close(recent[:, at : at + PAGE], floats.to(torch.float16))
            assert floats.any()


def test_a_table_has_a_slot_for_each_page_of_a_chunk_and_of_eight_sequences() -> None:
    slots = torch.zeros(4096 // PAGE, dtype=torch.int32)
    arena = Arena(torch.device("cpu"), 1 << 22)
    cache = DeviceCache.take(arena, 1, (16, 16), 4096, "q4_0", False, slots)
    pages = DeviceRecentPages([cache], slots)
    pages.touch(1001, 512)
    of_chunk = slots[1001 // PAGE - 2 : 1512 // PAGE + 1].tolist()
    assert len(set(of_chunk)) == len(of_chunk)
    rows = np.arange(8 * 4).reshape(8, 4) + 100
    pages.touch_batch(BatchPositions(np.full(8, 3 * PAGE + 5), rows))
    of_batch = slots[rows[:, 1:].ravel()].tolist()
    assert len(set(of_batch)) == 24
    assert int(slots[-1]) not in {*of_chunk, *of_batch}
