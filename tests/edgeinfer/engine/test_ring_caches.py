"""Texts in ring caches: rewinds, snapshots, eviction and drafts give what caches of all positions give."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.benchmarking.bench_targets import bytes_per_token
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.engine.ring_positions import RingPositions
from edgeinfer.generation.shared_prefix import AlternatingSequences
from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer.snapshots.engine_snapshots import EngineSnapshots
from edgeinfer.snapshots.snapshot_file import Snapshot
from edgeinfer.snapshots.store import SnapshotStore
from edgeinfer.speculation.drafter import Draft
from edgeinfer.speculation.trees.tree_pass import TreePass
from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.caches.layer_cache import LayerCache
from edgeinfer_kernels.caches.ring_cache import RING_SPARE, RING_STEP, RingCache, ring_for
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.sizes.cuda_buffers import CHUNK
from edgeinfer_offload.planner.plan_types import CPU_BATCH
from edgeinfer_quant_formats import GGUFFile
from tests.kernels.cpu.test_cpu_backend import Build, caches_of, cpu, exact, relative
from tests.model_zoo import ZOO
from tests.random_models import VOCABULARY
from tests.zoo.ring_layers import with_rings

CONTEXT, WINDOW, BATCH = 1300, 6, 32
SLACK = 42
RING = WINDOW + SLACK + RING_SPARE
IDS = np.random.default_rng(9).integers(3, VOCABULARY, 1200).tolist()


MODELS = {"windows": replace(ZOO["gemma3"], layers=4), "shared": ZOO["gemma4-per-layer"]}
"""Windows in all layers; in some, of which the last ones read the rings of earlier ones."""


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param].write(tmp_path_factory.mktemp("rings") / "model.gguf")


def engine_of(
    path: Path, build: Build = exact, ring: int = RING, kind: CacheType = "f32", context: int = CONTEXT
) -> NativeEngine:
    file = GGUFFile.open(path)
    config = read_config(file)
    spec = with_rings(config.specification(), ring)
    backend = build(spec, read_weights(file, config), DecoderState.allocate(spec, context, kind))
    return NativeEngine(spec, backend, context, BATCH)


def fresh(path: Path, ids: list[int]) -> npt.NDArray[np.float32]:
    """Logits after `ids` in caches of all positions."""
    return engine_of(path, ring=0).append(ids)


def test_a_ring_has_space_for_a_step_of_every_backend() -> None:
    assert RING % 16 == 0
    assert max(CHUNK, CPU_BATCH) <= RING_STEP
    assert ring_for(0) == 0
    assert ring_for(1024) == 1024 + RING_STEP + RING_SPARE


@pytest.mark.slow
@pytest.mark.default_cases(1)
def test_edits_process_again_what_the_rings_lost(path: Path) -> None:
    engine, source = engine_of(path), random.Random(3)
    assert engine.cache.rings is not None
    engine.append(IDS[:900])
    lost = 0
    for length in (880, 858, 850, 700, 699, 690, 500, 3, 0):
        lost += engine.reusable(length) != length
        engine.rewind(length)
        assert engine.ids == IDS[:length]
        tail = [source.randrange(VOCABULARY) for _ in range(20)]
        assert relative(engine.append(tail), fresh(path, IDS[:length] + tail)) < 1e-9
        engine.rewind(length)
    assert lost == 4


def test_the_number_of_reusable_tokens_is_exact(path: Path) -> None:
    engine = engine_of(path)
    engine.append(IDS[:900])
    assert [engine.reusable(length) for length in (900, 899, 858, 857, 10)] == [900, 899, 858, 0, 0]
    engine.rewind(0)
    engine.append(IDS[:48])  # nothing was overwritten
    assert [engine.reusable(length) for length in (48, 20, 1)] == [48, 20, 1]


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("length", [1000, 990, 958])
def test_a_snapshot_is_restored_to_what_its_rings_hold(path: Path, length: int) -> None:
    engine = engine_of(path, cpu())
    engine.append(IDS[:1000])
    snapshot = engine.snapshot()
    arrays = [np.array(array) for array in snapshot.arrays]
    other = engine_of(path, cpu())
    other.append(IDS[100:220])
    other.restore(Snapshot(snapshot.ids, arrays), length)
    assert other.ids == IDS[:length]
    assert [other.reusable(at) for at in (length, 958, 957)] == [length, 958, 0]
    engine.rewind(length)
    for token in IDS[50:60]:
        np.testing.assert_array_equal(other.append([token]), engine.append([token]))


@pytest.mark.slow
@pytest.mark.default_cases(1)
def test_an_older_prefix_of_a_snapshot_is_not_restored(path: Path, tmp_path: Path) -> None:
    engine = engine_of(path)
    store = SnapshotStore(tmp_path / "cache" / "snapshots", "model")
    snapshots = EngineSnapshots(engine, store)
    engine.append(IDS[:1000])
    assert snapshots.keep()
    engine.rewind(0)
    engine.append(IDS[:30])
    assert snapshots.restore([*IDS[:900], 5, 6], 30) == 30
    assert engine.ids == IDS[:30]
    with pytest.raises(ValueError, match="can't be rewound to 900 tokens"):
        engine.restore(saved(store), 900)
    assert snapshots.restore([*IDS[:1000], 5, 6], 30) == 1000
    assert relative(engine.append([7]), fresh(path, [*IDS[:1000], 7])) < 1e-9


def saved(store: SnapshotStore) -> Snapshot:
    found = store.longest(IDS)
    assert found is not None
    return found[0]


@pytest.mark.default_cases(1)
def test_snapshots_of_other_caches_are_refused(path: Path) -> None:
    whole, ring = engine_of(path, ring=0), engine_of(path)
    for engine in (whole, ring):
        engine.append(IDS[:400])
    of_whole, of_ring = whole.snapshot(), ring.snapshot()
    for engine, snapshot in ((whole, of_ring), (ring, of_whole)):
        with pytest.raises(ValueError, match=r"can't be rewound|another cache"):
            engine.restore(snapshot, 400)


def next_difference(engine: NativeEngine, other: NativeEngine, steps: int = 5) -> float:
    """The largest relative difference of the next logits of two engines."""
    tokens = IDS[-steps:]
    return max(relative(engine.append([token]), other.append([token])) for token in tokens)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_0"])
def test_a_shift_moves_the_positions_of_the_rings(path: Path, kind: CacheType) -> None:
    ring, whole = engine_of(path, cpu(), kind=kind), engine_of(path, cpu(), 0, kind)
    for dropped in (16, 304, 48):
        for engine in (ring, whole):
            engine.append(IDS[: 1000 - len(engine.ids)])
            engine.evict(range(4, 4 + dropped))
        assert next_difference(ring, whole) == 0
        assert ring.first_evicted == whole.first_evicted == 4


@pytest.mark.slow
def test_scattered_eviction_moves_what_the_rings_hold(path: Path) -> None:
    ring, whole = engine_of(path, cpu()), engine_of(path, cpu(), 0)
    indices = sorted(random.Random(1).sample(range(600, 980), 100))
    for engine in (ring, whole):
        engine.append(IDS[:1000])
        engine.evict(indices)
    assert next_difference(ring, whole) == 0
    assert ring.reusable(904) == 904
    assert ring.reusable(800) == 0


@pytest.mark.slow
@pytest.mark.default_cases(1)
def test_an_eviction_that_empties_the_window_processes_the_rest_again(path: Path) -> None:
    engine = engine_of(path)
    engine.append(IDS[:1000])
    engine.evict(range(300, 996))
    assert engine.ids == [*IDS[:300], *IDS[996:1000]]
    assert engine.text == IDS[:1000]
    assert relative(engine.append([7]), fresh(path, [*IDS[:300], *IDS[996:1000], 7])) < 1e-9


@pytest.mark.slow
@pytest.mark.default_cases(1)
def test_a_rewind_after_a_shift_keeps_the_evicted_tokens_of_the_text(path: Path) -> None:
    engine = engine_of(path)
    engine.append(IDS[:1000])
    engine.evict(range(4, 304))
    engine.rewind(500)
    assert engine.text == IDS[:800]
    assert engine.ids == [*IDS[:4], *IDS[304:800]]
    assert relative(engine.append([7]), fresh(path, [*IDS[:4], *IDS[304:800], 7])) < 1e-9


@pytest.mark.default_cases(1)
def test_attention_scores_of_rings_equal_those_of_whole_caches(path: Path) -> None:
    ring, whole = engine_of(path, cpu()), engine_of(path, cpu(), 0)
    for engine in (ring, whole):
        engine.append(IDS[:1000])
    np.testing.assert_array_equal(ring.attention_scores(32), whole.attention_scores(32))


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("start", [700, 638, 639, 640, 641])
def test_a_tree_draft_is_verified_in_rings(path: Path, start: int) -> None:
    """The pages of branches are after the text; near multiples of the ring they are at both of its ends."""
    draft = Draft((5, 6, 7, 8, 9, 10), parents=(-1, 0, 1, -1, 0, 1))
    results = []
    for ring in (RING, 0):
        engine = engine_of(path, cpu(), ring)
        engine.append(IDS[:start])
        tree = TreePass.of(engine, draft)
        assert tree is not None
        logits = tree.read(11)
        tree.keep(11, [0, 4])
        assert engine.ids[-3:] == [11, 5, 9]
        results += [logits, np.stack([engine.append([token]) for token in IDS[:60]])]
    for ring_rows, whole_rows in zip(results[:2], results[2:], strict=True):
        np.testing.assert_array_equal(ring_rows, whole_rows)


@pytest.mark.slow
@pytest.mark.default_cases(1)
def test_sequences_alternate_in_rings(path: Path) -> None:
    engine = engine_of(path)
    engine.append(IDS[:400])
    sequences = AlternatingSequences(engine)
    first, second = sequences.first, sequences.fork(sequences.first)
    for token in IDS[:60]:
        row = sequences.read([(first, token)])[-1]
    assert relative(row, fresh(path, IDS[:400] + IDS[:60])) < 1e-9
    row = sequences.read([(second, 4)])[-1]
    assert relative(row, fresh(path, [*IDS[:400], 4])) < 1e-9


def test_without_rings_nothing_is_recorded(path: Path) -> None:
    engine = engine_of(path, context=RING)
    assert engine.cache.rings is None
    assert RingPositions(engine.specification, RING).shapes == []
    assert RingPositions(engine.specification, RING + 1).shapes == [(WINDOW, RING)]


@pytest.mark.parametrize("path", ["windows"], indirect=True)
def test_a_token_reads_the_window_of_each_ring(path: Path) -> None:
    engine = engine_of(path, cpu(), kind="f16")
    assert all(block.window == WINDOW for block in engine.specification.specs(AttentionSpec))
    read = [bytes_per_token(engine, depth) for depth in (0, 3, 1000)]
    # Four layers, keys and values, two heads of 32 float16 each.
    assert read == pytest.approx([0, 3 * 1024, WINDOW * 1024])


@pytest.mark.parametrize("path", ["shared"], indirect=True)
def test_layers_that_share_a_ring_read_it_once_each(path: Path) -> None:
    engine = engine_of(path, cpu(), kind="f16")
    blocks = engine.specification.specs(AttentionSpec)
    assert [block.source_layer for block in blocks] == [None, None, None, 1, 1, 2]
    assert [block.has_ring(CONTEXT) for block in blocks] == [True, True, False, True, True, False]
    caches = caches_of(engine)
    assert [type(cache) for cache in caches] == [RingCache, RingCache, LayerCache]
    assert engine.cache.nbytes == sum(cache.nbytes for cache in caches)
    row = [4 * block.kv_heads * block.head_dim for block in blocks]
    windows, whole = (row[0] + row[1] + row[3] + row[4]), row[2] + row[5]
    assert bytes_per_token(engine, 1000) == pytest.approx(WINDOW * windows + 1000 * whole)
