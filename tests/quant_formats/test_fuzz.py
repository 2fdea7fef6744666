"""Ten thousand damaged files: each is read, or ends in one FormatError, in bounded memory and time."""

import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from edgeinfer_quant_formats import FORMATS, FormatError, GGUFFile
from tests.quant_formats import raw_gguf as raw
from tests.quant_formats.raw_gguf import RawGGUF, RawTensor

MUTATIONS = 10_000
SPARE_BYTES = 64 << 20
SECONDS_FOR_ALL = 40
SECONDS_FOR_ONE = 2

EXTREMES = (0, 1, 2, 31, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**61, 2**63 - 1, 2**63, 2**64 - 1)


def valid_file() -> RawGGUF:
    """A small file with every kind of value and a tensor of every format."""
    keys: list[tuple[str | bytes, int, bytes]] = [
        ("general.architecture", raw.STRING, raw.string("llama")),
        ("general.alignment", raw.UINT32, raw.uint32(32)),
        ("llama.rope.freq_base", raw.FLOAT32, np.float32(1e4).tobytes()),
        ("llama.block_count", raw.UINT64, raw.uint64(2)),
        ("flag", raw.BOOL, b"\x01"),
        ("tokens", raw.ARRAY, raw.array(raw.STRING, 4, b"".join(map(raw.string, ("a", "", "ÿ", "▁the"))))),
        ("scores", raw.ARRAY, raw.array(raw.FLOAT32, 4, bytes(16))),
        ("kinds", raw.ARRAY, raw.array(raw.INT32, 4, bytes(16))),
        ("flags", raw.ARRAY, raw.array(raw.BOOL, 4, b"\x00\x01\x01\x00")),
    ]
    tensors, data, noise = [], bytearray(), random.Random(41)
    for kind in FORMATS.values():
        dims = (kind.block_elements, 2)
        tensors.append(RawTensor(f"blk.{kind.name}", dims, kind.type_id, len(data) + -len(data) % 32))
        data += bytes(-len(data) % 32) + noise.randbytes(kind.nbytes(dims[::-1]))
    return RawGGUF(keys, tensors, bytes(data))


class Mutator:
    """Makes damaged copies of a file, each of another kind in turn."""

    def __init__(self, seed: int) -> None:
        source = valid_file()
        self.content = source.build()
        self.fields = source.fields
        self.header = len(self.content) - len(source.data)
        self.random = random.Random(seed)

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        kinds = (self.flip_bits, self.cut, self.overwrite_fields, self.splice, self.overwrite_bytes)
        for index in range(MUTATIONS):
            damage = kinds[index % len(kinds)]
            content = bytearray(self.content)
            damage(content)
            yield damage.__name__, bytes(content)

    def flip_bits(self, content: bytearray) -> None:
        for _ in range(self.random.choice((1, 1, 2, 8))):
            content[self.random.randrange(self.header)] ^= 1 << self.random.randrange(8)

    def cut(self, content: bytearray) -> None:
        del content[self.random.randrange(len(content)) :]

    def overwrite_fields(self, content: bytearray) -> None:
        for _ in range(self.random.choice((1, 1, 1, 2))):
            offset, size = self.random.choice(self.fields)
            near = int.from_bytes(content[offset : offset + size], "little") + self.random.choice((-1, 1, 32))
            value = self.random.choice((*EXTREMES, len(content), near, self.random.getrandbits(64)))
            content[offset : offset + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")

    def splice(self, content: bytearray) -> None:
        start, end = sorted(self.random.randrange(len(content)) for _ in range(2))
        piece = content[start : min(end, start + 200)]
        target = self.random.randrange(self.header)
        replaced = self.random.choice((0, 0, len(piece), self.random.randrange(200)))
        content[target : target + replaced] = piece

    def overwrite_bytes(self, content: bytearray) -> None:
        start = self.random.randrange(len(content))
        size = self.random.choice((1, 4, 8, 64))
        content[start : start + size] = self.random.choice(
            (bytes(size), b"\xff" * size, self.random.randbytes(size))
        )


@contextmanager
def no_more_memory_than(spare_bytes: int) -> Iterator[None]:
    """Let this process reserve at most this many more bytes; more is a MemoryError."""
    if not sys.platform.startswith("linux"):
        yield
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    reserved = pages * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (reserved + spare_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def outcome(path: Path) -> str:
    try:
        with GGUFFile.open(path) as file:
            for key in file.metadata:
                file.metadata[key]
            for name in file.tensors:
                file.decode(name)
    except FormatError as error:
        message = str(error)
        assert message.startswith(f"{path}: ")
        assert message.isprintable()
        return "refused"
    return "read"


@pytest.mark.slow
def test_ten_thousand_mutations_are_parsed_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    counts: Counter[tuple[str, str]] = Counter()
    mutator = Mutator(seed=42)
    path.write_bytes(mutator.content)
    assert outcome(path) == "read"
    start = time.perf_counter()
    slowest = 0.0
    with warnings.catch_warnings(), no_more_memory_than(len(mutator.content) + SPARE_BYTES):
        warnings.simplefilter("error")
        for kind, content in mutator:
            # A new file each time: truncating an old one first costs more than the test.
            path.unlink()
            path.write_bytes(content)
            started = time.perf_counter()
            counts[kind, outcome(path)] += 1
            slowest = max(slowest, time.perf_counter() - started)
    seconds = time.perf_counter() - start
    print(f"{dict(counts)}, {seconds:.1f} s, slowest {slowest * 1000:.0f} ms")
    assert counts.total() == MUTATIONS
    for kind in ("flip_bits", "overwrite_fields", "splice", "overwrite_bytes"):
        assert counts[kind, "read"] > 0
        assert counts[kind, "refused"] > 0
    assert counts["cut", "refused"] == MUTATIONS // 5
    assert slowest < SECONDS_FOR_ONE
    assert seconds < SECONDS_FOR_ALL


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the guard needs /proc")
def test_the_guard_detects_excessive_memory_use() -> None:
    with no_more_memory_than(SPARE_BYTES), pytest.raises(MemoryError):
        np.empty(2 * SPARE_BYTES, np.uint8)
