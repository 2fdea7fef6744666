"""Attention with a window in a ring cache gives the bits of attention in a cache of all positions."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.caches.layer_cache import LayerCache
from edgeinfer_kernels.caches.ring_cache import RingCache
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_quant_formats import GGUFFile
from tests.kernels.conftest import ISAS
from tests.kernels.cpu.test_cpu_backend import Build, caches_of, cpu, exact
from tests.model_zoo import ZOO
from tests.random_models import VOCABULARY
from tests.zoo.ring_layers import with_rings

CONTEXT, RING = 400, 112
"""The ring is as long as a chunk of 64 and a window of 40 need, at least."""
IDS = np.random.default_rng(8).integers(3, VOCABULARY, 380).tolist()
NAMES = ("gemma3", "olmo2-windows", "gpt-oss", "gemma3n", "gemma4-per-layer", "mellum", "muse-glimmer")
CHUNKS = (1, 63, 64, 33, 17, 1, 1, 64, 64, 16, 2, 40)
Logits = npt.NDArray[np.float32]


def model(name: str, path: Path, window: int = 40) -> Path:
    extra = {**ZOO[name].extra, "attention.sliding_window": window}
    return replace(ZOO[name], extra=extra).write(path / f"{name}.gguf")


def engine_of(path: Path, build: Build, kind: CacheType, ring: int) -> NativeEngine:
    file = GGUFFile.open(path)
    config = read_config(file)
    spec = with_rings(config.specification(), ring)
    backend = build(spec, read_weights(file, config), DecoderState.allocate(spec, CONTEXT, kind))
    return NativeEngine(spec, backend, CONTEXT, 64)


def logits_of(engine: NativeEngine, ids: list[int]) -> Logits:
    """Logits after every token, in chunks of `CHUNKS`, then token by token."""
    rows, done, sizes = [], 0, iter(CHUNKS)
    while done < len(ids):
        some = ids[done : done + next(sizes, 1)]
        x = engine.backend.embed(some)
        engine.backend.forward(x, done)
        rows.append(engine.backend.logits(x))
        done += len(some)
    engine.close()
    return np.concatenate(rows)


def build_for(name: str) -> Build:
    return exact if name == "reference" else cpu(name)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("kind", ["f32", "f16", "fp8", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("isa", [*ISAS, "reference"])
def test_logits_equal_those_of_a_whole_cache_bit_for_bit(
    tmp_path: Path, name: str, kind: CacheType, isa: str
) -> None:
    path, build = model(name, tmp_path), build_for(isa)
    ring = engine_of(path, build, kind, RING)
    assert {type(cache) for cache in caches_of(ring)} == {RingCache, LayerCache}
    np.testing.assert_array_equal(logits_of(ring, IDS), logits_of(engine_of(path, build, kind, 0), IDS))
