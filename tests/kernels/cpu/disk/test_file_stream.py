"""Blocks that every step reads from the file give the results of memory-mapped ones, in any order."""

import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from edgeinfer_kernels.backend import BackendError
from edgeinfer_kernels.cpu.backend import CpuBackend, CpuOptions
from edgeinfer_kernels.cpu.compiler.kernel_units import kernel_units
from edgeinfer_kernels.cpu.disk.disk_reader import DiskReader
from edgeinfer_kernels.cpu.disk.file_stream import StreamedFile, stream_bytes
from edgeinfer_kernels.decoder import BlockIndex, DecoderSpec, DecoderWeights
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.matrix import Matrix
from tests.kernels.conftest import BEST, built_kernels
from tests.kernels.cpu.sparse.test_sparse import Rows, decoder, inputs
from tests.kernels.system.marks import NEEDS_PREAD

pytestmark = NEEDS_PREAD

LAYERS = 5
FORMATS = ("Q4_0", "Q8_0", "Q6_K")


def spilled(weights: DecoderWeights) -> list[Matrix]:
    """The feed-forwards of all layers but the first, and the attention of the last."""
    return [
        matrix
        for layer in range(1, LAYERS)
        for position in ((0, 1) if layer == LAYERS - 1 else (1,))
        for matrix in weights.residual(BlockIndex(layer, position)).block.matrices()
    ]


def write_file(path: Path, matrices: list[Matrix]) -> StreamedFile:
    """A file with these matrices at odd offsets, of which the last ends the file."""
    offsets = {}
    with path.open("wb") as file:
        for index, matrix in enumerate(matrices):
            file.write(bytes(37 * index))
            offsets[id(matrix)] = file.tell()
            file.write(matrix.raw.tobytes())
    return StreamedFile(path, offsets)


@contextmanager
def loaded(spec: DecoderSpec, weights: DecoderWeights, file: StreamedFile | None) -> Iterator[CpuBackend]:
    kernels = built_kernels(BEST, kernel_units(weights))
    options = CpuOptions(32, 2, spilled(weights), streamed=file)
    backend = CpuBackend(spec, weights, DecoderState.allocate(spec, 64, "f32"), kernels, options)
    try:
        yield backend
    finally:
        backend.close()


def forward(backend: CpuBackend, tokens: int, start: int) -> Rows:
    rows = backend.embed([0] * tokens)
    rows[:] = inputs(tokens)
    backend.forward(rows, start)
    return rows.copy()


@pytest.mark.parametrize("gated", [True, False])
def test_streamed_blocks_give_the_results_of_mapped_ones_bit_by_bit(tmp_path: Path, gated: bool) -> None:
    spec, weights = decoder("relu_squared", gated, FORMATS, layers=LAYERS)
    file = write_file(tmp_path / "weights", spilled(weights))
    with loaded(spec, weights, None) as mapped, loaded(spec, weights, file) as streamed:
        assert streamed.decoder.stream is not None
        for tokens, start in ((1, 0), (3, 1), (20, 4), (1, 24), (1, 25)):
            assert np.array_equal(forward(streamed, tokens, start), forward(mapped, tokens, start))


def test_steps_of_some_layers_read_other_blocks(tmp_path: Path) -> None:
    spec, weights = decoder("relu", True, FORMATS, layers=LAYERS)
    file = write_file(tmp_path / "weights", spilled(weights))
    with loaded(spec, weights, None) as mapped, loaded(spec, weights, file) as streamed:
        for layers in ([0, 3], [4, 1], [1], [1, 2, 3, 4], [0, 1, 2, 3, 4]):
            result = []
            for backend in (mapped, streamed):
                rows = backend.embed([0])
                rows[:] = inputs(1)
                backend.forward_layers(rows, 0, layers)
                result.append(rows.copy())
            assert np.array_equal(result[0], result[1])


def test_a_streamed_file_that_was_cut_gives_an_error(tmp_path: Path) -> None:
    spec, weights = decoder("relu", True, FORMATS, layers=LAYERS)
    file = write_file(tmp_path / "weights", spilled(weights))
    with loaded(spec, weights, file) as streamed:
        os.truncate(file.path, 4096)
        with pytest.raises(BackendError, match="weights: a part of it couldn't be read"):
            forward(streamed, 1, 0)


def test_the_slots_take_the_planned_bytes(tmp_path: Path) -> None:
    spec, weights = decoder("relu", True, FORMATS, layers=LAYERS)
    file = write_file(tmp_path / "weights", spilled(weights))
    largest = weights.residual(BlockIndex(1, 1)).block.matrices()
    with loaded(spec, weights, file) as streamed:
        assert streamed.decoder.stream is not None
        assert streamed.decoder.stream.nbytes == stream_bytes([matrix.raw.nbytes for matrix in largest])


def test_memory_that_is_read_to_exists_until_the_reads_have_ended(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(1 << 20))
    reader = DiskReader(path, built_kernels(BEST, []), 2)
    target = weakref.ref(reader.target(1 << 20))
    gc.collect()
    assert target() is not None
    reader.close()
    del reader
    gc.collect()
    assert target() is None
