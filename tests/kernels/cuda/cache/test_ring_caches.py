"""Ring caches on a device: layers with a window give the bits of caches of all positions."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from tests.kernels.cuda.decoders import CONTEXT, Decoder, Logits, opened, read
from tests.model_zoo import ZOO
from tests.random_models import RandomModel
from tests.zoo.ring_layers import with_rings

RING = 32
"""A window of 6 and chunks of 16 need 21 positions."""
MODELS: dict[str, tuple[RandomModel, tuple[int, ...]]] = {
    "windows": (ZOO["gemma3"], (4, 5)),
    "values shorter than keys": (ZOO["mimo2"], (0, 1)),
}
CASES: tuple[tuple[str, CacheType], ...] = (
    ("windows", "q8_0"),
    ("windows", "q4_0"),
    ("values shorter than keys", "f16"),
    ("values shorter than keys", "q4_0"),
)
COUNTS = (16, 3, 16, 1, 2, 16, 1, 8)
"""The ring is filled twice; a chunk, and steps, begin at one end and end at the other."""


@contextmanager
def ring_and_whole(name: str, folder: Path) -> Iterator[tuple[Decoder, Decoder]]:
    """A decoder with a ring in one of two layers, and the same without."""
    model, layers = MODELS[name]
    with opened(model, folder, layers) as decoder:
        spec = decoder.specification
        ring, whole = (replace(decoder, specification=with_rings(spec, size)) for size in (RING, 0))
        yield ring, whole


@pytest.mark.slow
@pytest.mark.default_cases(1)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_logits_equal_those_of_a_whole_cache_bit_for_bit(
    device: str, tmp_path: Path, name: str, kind: CacheType
) -> None:
    results = []
    with ring_and_whole(name, tmp_path) as decoders:
        for decoder in decoders:
            backend = decoder.backend(device, kv=kind)
            assert backend.nbytes == decoder.counted_bytes(device, kv=kind)
            results.append((read(backend, decoder.ids(63), COUNTS), backend.nbytes))
            backend.close()
        sizes = [ModelSizes.of(decoder.specification, decoder.weights) for decoder in decoders]
    (ring, ring_bytes), (whole, whole_bytes) = results
    assert ring.keys() == whole.keys()
    for at, row in ring.items():
        np.testing.assert_array_equal(row, whole[at])
    planned = [sum(block.state_device_bytes(CONTEXT, kind) for block in each.blocks) for each in sizes]
    assert planned[1] - planned[0] == whole_bytes - ring_bytes


def shifted(backend: CudaBackend, decoder: Decoder) -> dict[int, Logits]:
    """Logits after an eviction and, after a rewind, after another text."""
    ids = decoder.ids(80)
    read(backend, ids, (16, 16, 16, 8))
    backend.evict(np.arange(3, 30), 56)
    after = read(backend, ids[56:], (2,), start=29)
    held = [array.copy() for array in backend.snapshot(31)]
    again = read(backend, ids[60:], (1, 2), start=31)
    read(backend, ids[63:], (16,), start=10)
    backend.restore(held, 31)
    restored = read(backend, ids[60:], (1, 2), start=31)
    for at, row in restored.items():
        np.testing.assert_array_equal(row, again[at])
    return {**after, **{100 + at: row for at, row in again.items()}}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_shifts_and_snapshots_equal_those_of_a_whole_cache(
    device: str, tmp_path: Path, name: str, kind: CacheType
) -> None:
    results = []
    with ring_and_whole(name, tmp_path) as decoders:
        for decoder in decoders:
            backend = decoder.backend(device, kv=kind)
            results.append(shifted(backend, decoder))
            backend.close()
    ring, whole = results
    assert ring.keys() == whole.keys()
    for at, row in ring.items():
        np.testing.assert_array_equal(row, whole[at])
