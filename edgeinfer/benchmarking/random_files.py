"""Random model files with the shape of a real model, stored in the user's cache; as fast as the real
model.
"""

import hashlib
import math
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.benchmarking.random_blocks import Bytes, RandomBlocks
from edgeinfer.errors import OutOfMemoryError
from edgeinfer.shapes.headers import matrix_formats, shape_metadata
from edgeinfer.shapes.known_shapes import find_shape
from edgeinfer.shapes.shape import Shape
from edgeinfer.user_folders import user_folder
from edgeinfer_quant_formats import FormatError, GGUFFile, GGUFWriter, block_format

REVISION = 3
"""Part of the files' names; increase it when the content changes."""
EMBEDDING, EMBEDDED = "token_embd.weight", 4.0
"""The spread of a MoE model's embeddings: well above the output of the layers, which is similar for all
tokens, so that different tokens are routed to different experts.
"""
SPARE_BYTES = 256 << 20
SPECIAL = ("<unk>", "<s>", "</s>")
_UNKNOWN, _NORMAL, _CONTROL, _BYTE = 2, 1, 3, 6

Progress = Callable[[int, int], None]
"""Called with (bytes written, total bytes)."""


def random_files_folder() -> Path:
    """The folder of these files; they may be deleted at any time."""
    return user_folder("cache") / "random-models"


def random_file(shape: str, kind: str, progress: Progress | None = None, folder: Path | None = None) -> Path:
    """The path of a random file of a shape and type; created if it doesn't exist.

    Raises `SettingError` or `FormatError` for an unknown shape or type, `OutOfMemoryError` if the disk is
    full.
    """
    found_shape = find_shape(shape)
    matrix_formats(found_shape, kind)
    folder = folder or random_files_folder()
    path = folder / f"{found_shape.name}-{kind.upper()}-random-{REVISION}.gguf"
    if not _is_whole(path):
        folder.mkdir(parents=True, exist_ok=True)
        write_random_file(path, found_shape, kind, progress)
    return path


def write_random_file(path: Path, shape: Shape, kind: str, progress: Progress | None = None) -> None:
    """Write a file of that shape, streamed and atomically; equal for equal arguments."""
    formats = matrix_formats(shape, kind)
    matrices = shape.matrices()
    total = sum(block_format(formats[name]).nbytes(size) for name, size in matrices.items())
    free = shutil.disk_usage(path.parent).free
    if free < total + SPARE_BYTES:
        raise OutOfMemoryError(
            f"{path.parent}: {free / 2**30:.1f} GiB free, the file of {shape.name} takes "
            f"{total / 2**30:.1f} GiB; free some, or take a smaller shape or type"
        )
    count = _ByteCount(total, progress)
    seed = int.from_bytes(hashlib.sha256(shape.name.encode()).digest()[:8])
    random = np.random.Generator(np.random.SFC64(seed))
    with GGUFWriter(path, metadata(shape)) as writer:
        for name, length in shape.vectors().items():
            values = _vector(name, length, random)
            if shape.recurrent:
                values = values.reshape(shape.recurrent.dimensions(name, length))
            writer.add_tensor(name, values, "F32")
        for name, size in matrices.items():
            own = shape.experts and not shape.tied and name == EMBEDDING
            spread = EMBEDDED if own else size[-1] ** -0.5
            blocks = RandomBlocks(formats[name], spread, random)
            source = partial(count.passed, blocks, math.prod(size))
            writer.add_tensor(name, source, formats[name], size)


class _ByteCount:
    """Reports the number of bytes written."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._done = 0
        self._progress = progress

    def passed(self, blocks: RandomBlocks, elements: int) -> Iterator[Bytes]:
        """The blocks of `elements` weights, counted."""
        for piece in blocks.stream(elements):
            yield piece
            self._done += piece.nbytes
            if self._progress:
                self._progress(self._done, self._total)


def _is_whole(path: Path) -> bool:
    """Whether the file exists and is valid; an invalid one is written again."""
    try:
        GGUFFile.open(path).close()
    except (OSError, FormatError):
        return False
    return True


def _vector(name: str, length: int, random: np.random.Generator) -> npt.NDArray[np.float32]:
    values = 0.1 * random.standard_normal(length)
    if name.endswith("ssm_a"):
        return -np.exp(5 * values).astype(np.float32)
    return (values if name.endswith("bias") else 1 + values).astype(np.float32)


def metadata(shape: Shape) -> dict[str, Any]:
    """The metadata of the file; the context is the shape's own."""
    return {
        **shape_metadata(shape),
        "general.name": f"random weights in the shape of {shape.name}",
        **vocabulary_metadata(shape.vocabulary),
    }


def vocabulary_metadata(size: int) -> dict[str, Any]:
    """A SentencePiece vocabulary of `size` >= 259 tokens: special tokens, bytes, then words of rising
    length.
    """
    pieces = islice(_pieces(), size - len(SPECIAL) - 256)
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    normal = size - len(SPECIAL) - 256
    types = [_UNKNOWN, _CONTROL, _CONTROL] + [_BYTE] * 256 + [_NORMAL] * normal
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": -np.arange(size, dtype=np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def _pieces() -> Iterator[str]:
    """Endless distinct pieces, short ones first, each with and without a leading space."""
    yield "▁"
    lengths = (product(ascii_lowercase, repeat=length) for length in range(1, 6))
    for letters in chain.from_iterable(lengths):
        yield "".join(letters)
        yield "▁" + "".join(letters)
