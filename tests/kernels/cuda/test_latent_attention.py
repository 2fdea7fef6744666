"""Latent attention on a GPU against the reference: any token count, cache type and size; snapshots."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.device_parts import DeviceOptions, DeviceParts
from edgeinfer_kernels.cuda.tuning.step_shapes import MAX_SPLITS, latent_rows, latent_splits
from edgeinfer_kernels.cuda.weights.plane_formats import UnsupportedOnDeviceError
from tests.kernels.cuda.conftest import HAS_GPU
from tests.kernels.cuda.decoders import CONTEXT, FLOATS_AGREE, opened, read, worst
from tests.model_zoo import ZOO
from tests.random_latents import latent_layers, without_rope
from tests.random_models import RandomModel

DENSE = replace(ZOO["deepseek2"], layers=1, dense_layers=1)
LITE = replace(ZOO["deepseek2-lite"], layers=1, dense_layers=1)
AGREES = {"f16": 2 * FLOATS_AGREE, "fp8": 0.06, "q8_0": 0.02, "q4_0": 0.08}
"""A code next to that of the reference is one step of the cache away."""
WIDTHS = range(1, 9) if HAS_GPU else (1, 2, 5, 8)
SIZES: dict[str, RandomModel] = {
    "latent vectors of 96": replace(LITE, width=96),
    "latent vectors of 512": replace(LITE, width=512, hybrid=latent_layers(), feed_forward=32),
    "six heads": replace(LITE, heads=6),
    "twenty heads": replace(DENSE, heads=20),
}


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("model", [DENSE, LITE], ids=["low-rank queries", "one matrix"])
def test_steps_of_any_token_count_equal_the_reference(
    device: str, tmp_path: Path, model: RandomModel, width: int
) -> None:
    with opened(model, tmp_path) as decoder:
        ids = decoder.ids(9 + 2 * width)
        backend = decoder.backend(device)
        result = read(backend, ids, (9, width, width), expected=width)
        backend.close()
        assert worst(result, decoder.reference_logits(ids)) < 3 * FLOATS_AGREE


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", SIZES)
def test_other_sizes_equal_the_reference(device: str, tmp_path: Path, name: str) -> None:
    with opened(SIZES[name], tmp_path) as decoder:
        ids = decoder.ids(14)
        backend = decoder.backend(device)
        result = read(backend, ids, (11, 1, 2))
        backend.close()
        assert worst(result, decoder.reference_logits(ids)) < 3 * FLOATS_AGREE


def test_the_last_elements_may_have_no_rope(device: str, tmp_path: Path) -> None:
    with opened(DENSE, tmp_path) as given:
        decoder = replace(given, specification=without_rope(given.specification))
        ids = decoder.ids(14)
        backend = decoder.backend(device)
        result = read(backend, ids, (11, 1, 2))
        assert backend.nbytes == decoder.counted_bytes(device) < given.counted_bytes(device)
        backend.close()
        assert worst(result, decoder.reference_logits(ids)) < 3 * FLOATS_AGREE
        assert worst(result, given.reference_logits(ids)) > 0.02


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("kind", AGREES)
@pytest.mark.parametrize("name", ["narrow", "latent vectors of 512"])
def test_a_small_cache_equals_the_reference(device: str, tmp_path: Path, name: str, kind: CacheType) -> None:
    with opened(SIZES.get(name, DENSE), tmp_path) as decoder:
        ids = decoder.ids(15)
        backend = decoder.backend(device, kv=kind)
        result = read(backend, ids, (12, 1, 2))
        backend.close()
        assert worst(result, decoder.reference_logits(ids, kind)) < AGREES[kind]


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("kind", ["f16", "q4_0"])
def test_a_cache_is_saved_and_restored_bit_for_bit(device: str, tmp_path: Path, kind: CacheType) -> None:
    with opened(DENSE, tmp_path) as decoder:
        ids, backend = decoder.ids(12), decoder.backend(device, kv=kind)
        expected = read(backend, ids, (11, 1), expected=1)[11]
        held = [array.copy() for array in backend.snapshot(11)]
        read(backend, ids[::-1], (11,))
        backend.restore(held, 11)
        np.testing.assert_array_equal(read(backend, ids[11:], (1,), start=11)[0], expected)
        backend.close()


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("kind", AGREES)
def test_a_shifted_cache_equals_the_reference(device: str, tmp_path: Path, kind: CacheType) -> None:
    with opened(LITE, tmp_path) as decoder:
        ids, evicted = decoder.ids(48), np.r_[5:9, 12:24]
        backend = decoder.backend(device, kv=kind, chunk=45)
        read(backend, ids, (45,))
        backend.evict(evicted, 45)
        result = read(backend, ids[45:], (1, 2), expected=3, start=29)
        backend.close()
        assert worst(result, decoder.shifted_logits(ids[:45], evicted, ids[45:], kind)) < AGREES[kind]
        if kind == "f16":
            assert worst(result, decoder.reference_logits(ids)[45:]) > 0.02


def test_rows_that_leave_a_program_unfilled_are_refused(device: str, tmp_path: Path) -> None:
    model = replace(DENSE, hybrid=latent_layers(query_share=0.375))
    expected = r"rank 24\), the GPU kernels need a multiple of 16"
    with opened(model, tmp_path) as decoder, pytest.raises(UnsupportedOnDeviceError, match=expected):
        decoder.backend(device)


def test_old_gpus_are_refused_in_one_line(tmp_path: Path) -> None:
    with opened(DENSE, tmp_path) as decoder:
        options = DeviceOptions(chunk=16)
        expected = "latent attention needs compute capability 8.0, the GPU has 7.5"
        with pytest.raises(UnsupportedOnDeviceError, match=expected):
            DeviceParts.take(decoder.specification, decoder.weights, CONTEXT, Arena(), 75, options)


@pytest.mark.parametrize("heads", [1, 16, 20, 32, 128])
def test_kv_splits_fill_a_gpu_and_the_buffers(heads: int) -> None:
    for tokens in range(1, 9):
        rows = latent_rows(heads, tokens)
        splits = latent_splits(rows, MAX_SPLITS)
        assert rows >= heads * tokens
        assert 1 <= splits <= MAX_SPLITS
        assert splits * rows <= max(2048, rows)
