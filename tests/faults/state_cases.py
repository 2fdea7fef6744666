"""Damaged state files: snapshots, chats, measurements, kernels, settings. Each is detected or harmless."""

import hashlib
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from edgeinfer.history.store import ChatStore
from edgeinfer.history.tree import ChatTree, branch_to
from edgeinfer.registry.entries import read_registry
from edgeinfer.snapshots.snapshot_file import Snapshot
from edgeinfer.snapshots.store import SnapshotStore
from edgeinfer_kernels.cpu.compiler.features import choose
from edgeinfer_kernels.cpu.compiler.kernel_cache import DIGEST_BYTES, KernelCache, objects_folder
from edgeinfer_offload.machine.measured_figures import MeasuredFigures
from edgeinfer_tui.options.settings import valid_settings
from tests.faults.outcomes import Case, report

Damage = Callable[[bytearray, random.Random], None]
IDS = list(range(100))
SETTINGS = b"""
threads = 2
temperature = 0.5
dry_sequence_breakers = ["a", "b"]
model = "tiny"
top_k = 40
"""
MODELS = b"""
[small]
file = "small-{quant}.gguf"
repository = "owner/name"
quants = ["Q8_0", "Q4_K_M"]
size_bytes = { Q8_0 = 100, Q4_K_M = 50 }
context = 2048
"""


def flip(content: bytearray, noise: random.Random) -> None:
    content[noise.randrange(len(content))] ^= 1 << noise.randrange(8)


def overwrite(content: bytearray, noise: random.Random) -> None:
    start, size = noise.randrange(len(content)), noise.choice((1, 8, 100, 4096))
    filling = noise.choice((bytes(size), b"\xff" * size, noise.randbytes(size)))
    content[start : start + size] = filling[: len(content) - start]


def cut(content: bytearray, noise: random.Random) -> None:
    del content[noise.randrange(len(content)) :]


def splice(content: bytearray, noise: random.Random) -> None:
    start, target = noise.randrange(len(content)), noise.randrange(len(content))
    piece = bytes(content[start : start + noise.randrange(1, 600)])
    content[target : target + noise.choice((0, len(piece)))] = piece


def lengthen(content: bytearray, noise: random.Random) -> None:
    content += noise.randbytes(noise.randrange(1, 5000))


DAMAGES: tuple[Damage, ...] = (flip, overwrite, cut, splice, lengthen)


def damaged(path: Path, valid: bytes, number: int) -> str:
    """Write a damaged copy; returns its name. File modes stay the same."""
    noise, kind = random.Random(number), DAMAGES[number % len(DAMAGES)]
    content = bytearray(valid)
    kind(content, noise)
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(content)
    return f"{path.name} {kind.__name__} {number}"


def snapshot_cases(folder: Path, count: int) -> Iterator[Case]:
    store = SnapshotStore(folder / "snapshots", "a" * 32)
    noise = np.random.default_rng(1)
    arrays = [noise.standard_normal((2, 50, 8)).astype(np.float16), noise.integers(0, 9, (3, 70), np.int8)]
    store.keep(Snapshot(IDS, [*arrays]))
    (path,) = (folder / "snapshots").iterdir()
    valid = path.read_bytes()

    def use() -> None:
        result = store.longest([*IDS, 7])
        if result is not None:
            same = all(map(np.array_equal, result[0].arrays, arrays))
            assert same, "damage was believed"
            assert result[0].ids == IDS, "damage was believed"

    for number in range(count):
        yield damaged(path, valid, number), use


def chat_cases(folder: Path, count: int) -> Iterator[Case]:
    path = folder / "chats" / "chats.sqlite"
    with ChatStore(path) as store:
        for name in ("foxes", "hens"):
            chat, before = store.new_chat("tiny", "Be kind.", name), None
            for index in range(30):
                role = "assistant" if index % 2 else "user"
                before = store.add_message(chat.id, before, role, f"turn {index} " * 30).id  # type: ignore[arg-type]
    valid = path.read_bytes()

    def use() -> None:
        for _ in range(2):  # damage found at one start must not affect the next
            with ChatStore(path) as store:
                for chat in store.chats():
                    branch_to(ChatTree(store.messages(chat)).with_number(chat.tip))
                    store.branch(chat)
                store.search("turn")
                fresh = store.new_chat("tiny")
                store.add_message(fresh.id, None, "user", "Hi")

    for number in range(count):
        shutil.rmtree(path.parent)
        path.parent.mkdir()
        yield damaged(path, valid, number), use


def figure_cases(folder: Path, count: int) -> Iterator[Case]:
    measurements = MeasuredFigures(folder / "figures", "machine")
    measurements.keep({f"figure {index}": float(index) for index in range(20)})
    path, known = folder / "figures" / "measured.json", measurements.known()

    def use() -> None:
        assert measurements.known() in ({}, known), "damage was believed"
        measurements.keep({"more": 1.0})

    valid = path.read_bytes()
    for number in range(count):
        yield damaged(path, valid, number), use


def kernel_cases(folder: Path, count: int) -> Iterator[Case]:
    root, isa = folder / "kernels", choose()
    objects = objects_folder(root, isa)
    objects.mkdir(parents=True, mode=0o700)
    root.chmod(0o700)
    body, path = random.Random(3).randbytes(9000), objects / "blocks.o"
    path.write_bytes(body)
    valid = body + hashlib.sha256(body).digest()
    assert len(valid) == len(body) + DIGEST_BYTES

    def use() -> None:
        assert KernelCache(root, isa).find("blocks") in (None, body), "damage was believed"

    for number in range(count):
        yield damaged(path, valid, number), use


def toml_cases(folder: Path, count: int) -> Iterator[Case]:
    settings, models = folder / "settings.toml", folder / "models.toml"

    def read_settings() -> None:
        _, wrong = valid_settings({"EDGEINFER_CONFIG": str(settings)})
        for error in wrong:
            raise error

    for number in range(count // 2):
        yield damaged(settings, SETTINGS, number), read_settings
        yield damaged(models, MODELS, number), lambda: read_registry(models)


KINDS = {
    "snapshots": snapshot_cases,
    "chats": chat_cases,
    "figures": figure_cases,
    "kernels": kernel_cases,
    "toml": toml_cases,
}

if __name__ == "__main__":
    root_folder = Path(sys.argv[1])
    report(KINDS[sys.argv[2]](root_folder, int(sys.argv[3])), root_folder / "report.json")
