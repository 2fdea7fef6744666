"""The weights of blocks that are read from the model's file by every step: structures and memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgeinfer_kernels.cpu.block_builder import Call, PackedMatrix
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.disk.bundle_layout import SECTOR_BYTES, whole_sectors
from edgeinfer_kernels.cpu.disk.disk_reader import DiskReader
from edgeinfer_kernels.cpu.layout.packed_matrix import Arena, address
from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE
from edgeinfer_kernels.cpu.runtime.disk_args import (
    FileStreamArgs,
    StreamedBlockArgs,
    StreamedPartArgs,
    WantedReads,
)
from edgeinfer_kernels.decoder import BlockIndex
from edgeinfer_kernels.matrix import Matrix

STREAM_SLOTS = 2
"""Blocks of which one is computed while the others are read."""
STREAM_THREADS = 8
"""Reads in flight, each of READ_PIECE bytes."""


@dataclass(frozen=True)
class StreamedFile:
    """A model's file, and where each streamed matrix begins in it, by id."""

    path: Path
    offsets: Mapping[int, int]


def part_bytes(matrix_bytes: int) -> int:
    """Bytes of a slot that a matrix takes at most: whole sectors from before its first to after its last
    byte.
    """
    return whole_sectors(matrix_bytes) + SECTOR_BYTES


def stream_bytes(largest_block: Sequence[int]) -> int:
    """Bytes of the slots, from the bytes of the matrices of the largest block."""
    return STREAM_SLOTS * sum(map(part_bytes, largest_block))


class FileStream:
    """The streamed blocks of a decoder, in their order; `packed`: the memory-mapped matrices, by id."""

    def __init__(
        self,
        file: StreamedFile,
        matrices: Mapping[BlockIndex, Sequence[Matrix]],
        packed: Mapping[int, PackedMatrix],
        kernels: Kernels,
        arena: Arena,
    ) -> None:
        self.reader = DiskReader(file.path, kernels, STREAM_THREADS)
        self._arena = arena
        slot_bytes = max(sum(part_bytes(m.raw.nbytes) for m in each) for each in matrices.values())
        self.nbytes = STREAM_SLOTS * slot_bytes
        self.args = FileStreamArgs(
            reader=self.reader.address,
            count=len(matrices),
            slots=STREAM_SLOTS,
            memory=address(self.reader.target(self.nbytes)),
            slot_bytes=slot_bytes,
            finished=arena.keep(np.zeros(STREAM_SLOTS * CACHE_LINE // 8, np.int64)),
            wanted=arena.fill_all(WantedReads, [WantedReads()] * STREAM_SLOTS),
        )
        stream = arena.keep_args(self.args)
        made = [
            self._block(stream, number, [(m, packed[id(m)], file.offsets[id(m)]) for m in each])
            for number, each in enumerate(matrices.values())
        ]
        self.args.blocks = arena.fill_all(StreamedBlockArgs, made)
        size = int(np.dtype(np.int64).itemsize) * len(StreamedBlockArgs._fields_)
        self._blocks = {index: self.args.blocks + size * number for number, index in enumerate(matrices)}

    def _block(
        self, stream: int, number: int, matrices: Sequence[tuple[Matrix, PackedMatrix, int]]
    ) -> StreamedBlockArgs:
        parts, target = [], 0
        for matrix, packed, offset in matrices:
            begin = offset // SECTOR_BYTES * SECTOR_BYTES
            skipped = offset - begin
            nbytes = whole_sectors(skipped + matrix.raw.nbytes)
            parts.append(
                StreamedPartArgs(
                    rows=packed.weights, target=target, offset=begin, nbytes=nbytes, skipped=skipped
                )
            )
            target += nbytes
        first = self._arena.fill_all(StreamedPartArgs, parts)
        return StreamedBlockArgs(stream=stream, index=number, parts=first, part_count=len(parts))

    def around(self, index: BlockIndex, calls: Sequence[Call]) -> list[Call]:
        """The kernels of a block, between those that wait for its weights and that release them."""
        if index not in self._blocks:
            return list(calls)
        block = self._blocks[index]
        return [Call("streamed_block_begin", block), *calls, Call("streamed_block_end", block)]

    def close(self) -> None:
        """End the reads."""
        self.reader.close()
