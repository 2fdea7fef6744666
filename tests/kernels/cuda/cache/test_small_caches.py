"""Four-bit caches and shifted caches, of whole and of split decoders, against the reference."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from tests.kernels.cuda.conftest import HAS_GPU
from tests.kernels.cuda.decoders import FLOATS_AGREE, opened, read, worst
from tests.kernels.cuda.split_decoders import device_layer, split_decoder
from tests.kernels.split_layers import LayerSplit
from tests.model_zoo import SMALL_GEMMA3N, ZOO
from tests.random_models import RandomModel

pytestmark = pytest.mark.slow

AGREES = {"f16": 2 * FLOATS_AGREE, "fp8": 0.05, "q8_0": 0.02, "q4_0": 0.05, "q8_0/q4_0": 0.05}
"""A code next to that of the reference is one step of the cache away."""
ORDERED = "partial RoPE of neighbours, heads of 24"
"""Their keys' dimensions have another order on the device, and are rotated with others."""
MODELS: dict[str, tuple[RandomModel, tuple[int, ...]]] = {
    "norms of heads": (ZOO["qwen3"], (0,)),
    "windows, two kinds of RoPE": (ZOO["gemma3"], (4, 5)),
    "soft caps": (ZOO["gemma2"], (0,)),
    ORDERED: (
        RandomModel("llama", head_dim=24, extra={"rope.dimension_count": 8}),
        (0,),
    ),
    "values shorter than keys": (replace(ZOO["mimo2"], extra={"rope.dimension_count": 32}), (0,)),
}


def on_a_gpu(*case: object) -> Any:
    """A case that isn't interpreted: it covers little more than the others and takes long."""
    return pytest.param(*case, marks=pytest.mark.skipif(not HAS_GPU, reason="run on a GPU"))


@pytest.mark.parametrize(
    "name",
    [
        "windows, two kinds of RoPE",
        "values shorter than keys",
        *map(on_a_gpu, ("norms of heads", "soft caps", ORDERED)),
    ],
)
def test_a_four_bit_cache_equals_the_reference(device: str, tmp_path: Path, name: str) -> None:
    model, layers = MODELS[name]
    with opened(model, tmp_path, layers) as decoder:
        ids = decoder.ids(30 if HAS_GPU else 15)
        backend = decoder.backend(device, kv="q4_0")
        result = read(backend, ids, (12, 1, 2, 3, 4, 8) if HAS_GPU else (12, 3))
        backend.close()
        exact, same = decoder.reference_logits(ids), decoder.reference_logits(ids, "q4_0")
        of_floats, lost = worst(result, exact), worst(dict(enumerate(same)), exact)
        assert lost / 2 < of_floats < 1.5 * lost
        if name != ORDERED:
            assert worst(result, same) < min(AGREES["q4_0"], lost / 3)


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_caches_that_layers_share_equal_the_reference_and_are_restored(
    device: str, tmp_path: Path, kind: CacheType
) -> None:
    with opened(SMALL_GEMMA3N, tmp_path) as decoder:
        ids, backend = decoder.ids(14), decoder.backend(device, kv=kind)
        assert backend.nbytes == decoder.counted_bytes(device, kv=kind)
        result = read(backend, ids, (11, 1, 2))
        held = [array.copy() for array in backend.snapshot(11)]
        read(backend, ids[::-1], (11,))
        backend.restore(held, 11)
        again = read(backend, ids[11:], (1, 2), start=11)
        backend.close()
        for at, row in again.items():
            np.testing.assert_array_equal(row, result[11 + at])
        assert worst(result, decoder.reference_logits(ids, kind)) < AGREES["f16"]


EVICTED = np.r_[5:9, 12:24]
"""Of 45 positions, in two ranges."""
SHIFTED = [
    (ORDERED, "f16"),
    ("soft caps", "fp8"),
    ("norms of heads", "q8_0/q4_0"),
    ("windows, two kinds of RoPE", "q4_0"),
    ("values shorter than keys", "q8_0"),
    on_a_gpu("windows, two kinds of RoPE", "f16"),
    on_a_gpu(ORDERED, "q8_0"),
    on_a_gpu("norms of heads", "q8_0"),
    on_a_gpu("soft caps", "q4_0"),
]


@pytest.mark.default_cases(2)
@pytest.mark.parametrize(("name", "kind"), SHIFTED)
def test_a_shifted_cache_equals_the_reference(
    device: str, tmp_path: Path, name: str, kind: CacheType
) -> None:
    model, layers = MODELS[name]
    with opened(model, tmp_path, layers) as decoder:
        ids = decoder.ids(51)
        backend = decoder.backend(device, kv=kind, chunk=45)
        taken = backend.nbytes
        read(backend, ids, (45,))
        backend.evict(EVICTED, 45)
        result = read(backend, ids[45:], (1, 2, 3) if HAS_GPU else (2,), expected=3, start=29)
        assert backend.nbytes == taken
        backend.close()
        expected = decoder.shifted_logits(ids[:45], EVICTED, ids[45:], kind)
        assert worst(result, expected) < AGREES[kind]
        if kind == "f16":
            assert worst(result, decoder.reference_logits(ids)[45:]) > 0.02


def test_evicting_more_than_the_cache_holds_is_refused(device: str, tmp_path: Path) -> None:
    with opened(ZOO["llama"], tmp_path, (0,)) as decoder:
        backend = decoder.backend(device)
        with pytest.raises(ValueError, match="to evict, wanted rising ones of 19"):
            backend.evict(np.arange(4, 20), 19)
        backend.close()


def test_a_four_bit_cache_is_saved_and_restored_bit_for_bit(device: str, tmp_path: Path) -> None:
    with opened(ZOO["llama"], tmp_path, (0,)) as decoder:
        ids, backend = decoder.ids(12), decoder.backend(device, kv="q4_0")
        expected = read(backend, ids, (11, 1), expected=1)[11]
        held = [array.copy() for array in backend.snapshot(11)]
        read(backend, ids[::-1], (11,))
        backend.restore(held, 11)
        np.testing.assert_array_equal(read(backend, ids[11:], (1,), start=11)[0], expected)
        backend.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stream_min_tokens"), [("q4_0", 6), on_a_gpu("q8_0", None), on_a_gpu("f16", 6)]
)
def test_shards_of_a_split_decoder_shift_together(
    device: str, kernels: Kernels, tmp_path: Path, kind: CacheType, stream_min_tokens: int | None
) -> None:
    """With layers on both devices, whose prompts are evaluated by both or by the device alone."""
    model = replace(ZOO["gemma3"], layers=3)
    with opened(model, tmp_path) as decoder:
        splits = [LayerSplit(False), LayerSplit(True), device_layer(decoder, 2)]
        ids = decoder.ids(49)
        with split_decoder(
            decoder, device, splits, kernels, stream_min_tokens=stream_min_tokens, kv=kind
        ) as backend:
            shard: Any = backend
            read(shard, ids, (16, 16, 13), expected=1)
            backend.evict(EVICTED, 45)
            result = read(shard, ids[45:], (1, 3) if HAS_GPU else (2,), expected=3, start=29)
        assert worst(result, decoder.shifted_logits(ids[:45], EVICTED, ids[45:], kind)) < 2 * AGREES[kind]
