"""Neurons read from a file of bundles give the results of those in memory, with windows of any size."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer_kernels.backend import BackendError
from edgeinfer_kernels.blocks.feed_forward import Activation
from edgeinfer_kernels.cpu.backend import CpuBackend, CpuOptions
from edgeinfer_kernels.cpu.compiler.kernel_units import kernel_units
from edgeinfer_kernels.cpu.disk.bundle_layout import SECTOR_BYTES, BundleLayout, make_bundles
from edgeinfer_kernels.cpu.disk.bundle_windows import Bundles, LayerBundles, window_bytes
from edgeinfer_kernels.cpu.runtime.abi import SPARSE_TOKENS
from edgeinfer_kernels.cpu.sparse import SparseLayers, dense_layer
from edgeinfer_kernels.decoder import BlockIndex, DecoderSpec, DecoderWeights
from edgeinfer_kernels.decoder_state import DecoderState
from tests.kernels.conftest import BEST, PORTABLE, built_kernels, isas_and_formats
from tests.kernels.cpu.sparse.test_sparse import NEURONS, Rows, decoder, inputs, relative, select_all
from tests.kernels.system.marks import NEEDS_PREAD


def write_bundles(path: Path, weights: DecoderWeights, slots: int) -> Bundles:
    """A file with the bundles of all layers, from offset 512 on."""
    kernels, layers = built_kernels(BEST, []), {}
    with path.open("wb") as file:
        file.write(bytes(SECTOR_BYTES))
        for layer in range(len(weights.layers)):
            pieces, factors = make_bundles(dense_layer(weights, layer), kernels)
            layers[layer] = LayerBundles(file.tell(), factors)
            for piece in pieces:
                file.write(piece.tobytes())
    return Bundles(path, layers, slots)


@contextmanager
def loaded(
    spec: DecoderSpec, weights: DecoderWeights, sparse: SparseLayers, bundles: Bundles | None, isa: str = BEST
) -> Iterator[CpuBackend]:
    kernels = built_kernels(isa, kernel_units(weights, sparse=sparse))
    options = CpuOptions(32, 2, sparse=sparse, bundles=bundles)
    backend = CpuBackend(spec, weights, DecoderState.allocate(spec, 16, "f32"), kernels, options)
    try:
        yield backend
    finally:
        backend.close()


def feed_forwards(backend: CpuBackend, x: Rows) -> Rows:
    rows = backend.embed([0] * len(x))
    rows[:] = x
    for layer in range(len(backend.spec.layers)):
        backend.run_block(BlockIndex(layer, 1), rows, 0)
    return rows.copy()


def reads_and_hits(backend: CpuBackend, layer: int = 0) -> tuple[int, int]:
    assert backend.decoder.windows is not None
    args = backend.decoder.windows.windows[layer].args
    return args.reads, args.hits


FORMATS = [
    ("Q4_0", "Q4_0", "Q4_0"), ("Q8_0", "Q4_K", "Q6_K"), ("Q8_0", "Q4_K", "Q4_K"), ("Q6_K", "Q5_K", "Q5_K")
]  # fmt: skip
CASES: list[tuple[Activation, bool, bool]] = [
    ("relu", True, False), ("relu", True, True), ("relu_squared", False, False),
    ("relu_squared", False, True), ("drelu", True, False),
]  # fmt: skip


@NEEDS_PREAD
@pytest.mark.default_cases(2)
@pytest.mark.parametrize(("isa", "formats"), isas_and_formats([BEST, PORTABLE], FORMATS))
@pytest.mark.parametrize(("activation", "gated", "predicted"), CASES)
def test_bundles_of_a_file_give_the_results_of_neurons_in_memory_bit_by_bit(
    tmp_path: Path,
    isa: str,
    formats: tuple[str, str, str],
    activation: Activation,
    gated: bool,
    predicted: bool,
) -> None:
    spec, weights = decoder(activation, gated, formats, biases=True)
    sparse = {layer: select_all(weights) if predicted else None for layer in range(2)}
    bundles = write_bundles(tmp_path / "bundles", weights, NEURONS)
    with (
        loaded(spec, weights, sparse, None, isa) as held,
        loaded(spec, weights, sparse, bundles, isa) as read,
    ):
        for tokens in (1, SPARSE_TOKENS, 1):
            assert np.array_equal(feed_forwards(read, inputs(tokens)), feed_forwards(held, inputs(tokens)))
        reads, hits = reads_and_hits(read)
        assert 0 < reads <= NEURONS
        assert hits > 0


@NEEDS_PREAD
def test_a_small_window_reads_again_what_it_has_overwritten(tmp_path: Path) -> None:
    spec, weights = decoder("relu", True, ("Q4_0", "Q4_0", "Q4_0"))
    sparse: SparseLayers = {0: None, 1: None}
    rows = np.random.default_rng(3).standard_normal((24, 512)).astype(np.float32)
    with loaded(spec, weights, sparse, None) as held:
        expected = [feed_forwards(held, row[None]) for row in rows]
    with loaded(spec, weights, sparse, write_bundles(tmp_path / "b", weights, 400)) as read:
        for row, right in zip(rows, expected, strict=True):
            assert np.array_equal(feed_forwards(read, row[None]), right)
        reads, hits = reads_and_hits(read)
        assert reads > 400
        assert hits > reads / 4


@pytest.mark.default_cases(1)
@NEEDS_PREAD
@pytest.mark.parametrize(
    ("gated", "predicted", "slots"), [(True, False, 64), (True, True, 70), (False, False, 200)]
)
def test_a_step_that_needs_more_neurons_than_the_window_holds_takes_several_rounds(
    tmp_path: Path, gated: bool, predicted: bool, slots: int
) -> None:
    spec, weights = decoder("relu_squared", gated, ("Q8_0", "Q8_0", "Q6_K"))
    sparse = {layer: select_all(weights) if predicted else None for layer in range(2)}
    with loaded(spec, weights, sparse, None) as held:
        expected = feed_forwards(held, inputs(3))
    with loaded(spec, weights, sparse, write_bundles(tmp_path / "b", weights, slots)) as read:
        for _ in range(2):
            assert relative(feed_forwards(read, inputs(3)), expected) < 1e-6


@NEEDS_PREAD
def test_a_file_that_was_cut_gives_an_error_instead_of_wrong_numbers(tmp_path: Path) -> None:
    spec, weights = decoder("relu", True, ("Q4_0", "Q4_0", "Q4_0"))
    bundles = write_bundles(tmp_path / "b", weights, NEURONS)
    with loaded(spec, weights, {0: None, 1: None}, bundles) as read:
        os.truncate(tmp_path / "b", SECTOR_BYTES)
        with pytest.raises(BackendError, match=r"b: a part of it couldn't be read, .* load the model again"):
            feed_forwards(read, inputs(1))


def test_a_bundle_begins_at_a_sector_and_exact_steps_read_less_of_it() -> None:
    _, weights = decoder("relu", True, ("Q8_0", "Q8_0", "Q8_0"), layers=1)
    layout = BundleLayout.of(dense_layer(weights, 0))
    assert layout.nbytes % SECTOR_BYTES == 0
    assert layout.read_bytes(predicted=False) < layout.read_bytes(predicted=True) == layout.nbytes
    none, some = (window_bytes(layout, slots, predicted=True) for slots in (0, 10))
    assert some - none == 10 * (layout.nbytes + 16)
    assert none == layout.factor_bytes + 4 * NEURONS


def test_the_bundles_of_a_part_of_the_neurons_are_those_of_the_whole() -> None:
    _, weights = decoder("relu", True, ("Q4_0", "Q4_0", "Q4_0"), layers=1)
    whole = dense_layer(weights, 0)
    kernels = built_kernels(BEST, [])
    pieces, _ = make_bundles(whole, kernels)
    part, _ = make_bundles(replace(whole).of_neurons(0, 64), kernels)
    assert np.array_equal(next(part), next(pieces)[:64])
