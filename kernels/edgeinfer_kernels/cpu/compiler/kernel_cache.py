"""Compiled kernels: built once per machine in the background, cached, loaded without a compiler.

A unit (see `native/units.py`) becomes a native object file in the cache. Its folder's name is a hash of what
the code is made from: the kernels' sources, the compilers' versions and the instruction set, so that nothing
stale is ever found and no edit elsewhere builds anew; its last 32 bytes are a digest, so that a damaged file
is noticed and built again. Files appear by rename and are built under a lock: several programs may start at
once. Folders that nobody uses any more are removed (`kernel_folders.py`). Code is loaded only from folders
and files that no other user can write (`private_folder.py`). Where that can't be, or the cache can't be
written, a private folder for temporary files is used; where that fails too, what is missing is built for
this program alone.
"""

import ctypes
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from edgeinfer_kernels.cpu.compiler.features import InstructionSet, usable_cpus
from edgeinfer_kernels.cpu.compiler.kernel_folders import (
    BUILDING,
    DIGEST_CHARACTERS,
    mark_used,
    remove_unused,
)
from edgeinfer_kernels.system.file_lock import file_lock
from edgeinfer_kernels.system.private_folder import (
    distrust_reason,
    ensure_private,
    scratch_folder,
    temporary_root,
)

DIGEST_BYTES = 32
BLOCKS = "blocks"
"""The unit that every model needs."""
BUILD_TIMES = {BLOCKS: 3.5, "experts": 1.0, "sparse": 0.5, "service": 0.1}
BUILD_TIMES |= {f"rows_{name}": 0.1 for name in ("BF16", "F16", "F32")}
NEURONS_BUILD_TIME = 0.3
"""How long a unit takes to build, the rows of a quantized format taking 1."""
MAX_LOCK_SECONDS = 300.0
"""After so long kernels are built without waiting for another program any longer."""
IMPORTED_BY_NATIVE = (
    *("layout/fields.py", "runtime/abi.py"),
    *("compiler/build_object.py", "compiler/pipeline.py", "compiler/units.py"),
)
BuildProgress = Callable[[int, int], None]
"""Called with (units built, units to build), from any thread; not at all when everything is cached."""


class KernelBuildError(RuntimeError):
    """The compiler process failed; the text ends with what it said last."""


def kernel_sources() -> list[Path]:
    """The files that compiled code is made from: `native` and what it imports."""
    here = Path(__file__).parents[1]
    return [*sorted((here / "native").rglob("*.py")), *(here / name for name in IMPORTED_BY_NATIVE)]


@cache
def source_digest(isa: InstructionSet) -> str:
    """Hash of the kernels' sources, of the compilers that turn them into code, and of their target."""
    digest = hashlib.sha256()
    for path in kernel_sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for package in ("numba", "llvmlite"):
        digest.update(f"{package} {version(package)}\0".encode())
    digest.update(f"{isa.processor} {isa.feature_string}".encode())
    return digest.hexdigest()[:DIGEST_CHARACTERS]


def objects_folder(root: Path, isa: InstructionSet) -> Path:
    """Where an instruction set's object files lie."""
    return root / f"{platform.machine()}-{isa.name}-{source_digest(isa)}"


class KernelCache:
    """Object files of one instruction set in a folder of their own below `root`.

    What is built is built for the instruction sets `also` too, into their folders: the first half of a
    compiler's work is the same for all.
    """

    def __init__(self, root: Path, isa: InstructionSet, also: Sequence[InstructionSet] = ()) -> None:
        self.isa = isa
        self.root = root
        self.folder = objects_folder(root, isa)
        self._targets = (isa, *also)
        self.note: str | None = None
        """What a user should know of where the kernels are kept."""

    def find(self, unit: str) -> bytes | None:
        """The unit's object file, or None if there is none, or it is damaged or may be another user's."""
        path = self.folder / f"{unit}.o"
        try:
            if any(map(distrust_reason, (self.root, self.folder, path))):
                return None
            data = path.read_bytes()
        except OSError:  # none, or one that can't be read
            return None
        body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
        return body if hashlib.sha256(body).digest() == digest else None

    def build(self, units: Sequence[str], built: Callable[[], None]) -> None:
        """Compile units in one process and keep the results; each appears whole or not at all, then `built`
        is called.
        """
        with tempfile.TemporaryDirectory(dir=self.root, prefix=BUILDING) as scratch:
            for unit in self._compile(units, scratch):
                for number, isa in enumerate(self._targets):
                    made = object_file(scratch, number, unit)
                    body = made.read_bytes()
                    made.write_bytes(body + hashlib.sha256(body).digest())
                    made.chmod(0o600)
                    folder = objects_folder(self.root, isa)
                    ensure_private(folder)
                    os.replace(made, folder / f"{unit}.o")
                built()

    def _compile(self, units: Sequence[str], folder: str) -> Iterator[str]:
        """The units one by one, each when its object files are in the folder."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        targets = [
            {"processor": isa.processor, "features": isa.feature_string, "tiles": isa.tiles}
            for isa in self._targets
        ]
        module = "edgeinfer_kernels.cpu.compiler.build_object"
        command = [sys.executable, "-m", module, folder, json.dumps(targets), *units]
        with (
            open(Path(folder, "messages"), "w+", encoding="utf-8", errors="replace") as messages,
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=messages, text=True
            ) as process,
        ):
            assert process.stdout is not None
            try:
                yield from (line.strip() for line in process.stdout)
            except BaseException:
                process.kill()
                raise
            if process.wait() != 0:
                messages.seek(0)
                last = messages.read().strip().splitlines()[-1:] or ["no message"]
                raise KernelBuildError(f"building the {self.isa.name} kernels failed: {last[0]}")

    def objects(self, units: Iterable[str], progress: BuildProgress | None = None) -> list[bytes]:
        """The units' object files; what is missing is built, in as many processes as there are processors.

        `note` then says where they are kept if they can't be in the cache folder.
        """
        cached = {unit: self.find(unit) for unit in units}
        if None not in cached.values():
            return [body for body in cached.values() if body is not None]
        try:
            return self._completed(cached, progress)
        except OSError as error:  # a folder that can't be written or trusted, or a full disk
            why = f"{error.filename}: {error.strerror}" if error.strerror else str(error)
            self.note = f"compiled kernels can't be kept: {why}"
            return self._built_elsewhere(cached, progress)

    def _built_elsewhere(
        self, cached: Mapping[str, bytes | None], progress: BuildProgress | None
    ) -> list[bytes]:
        """The units' object files, those that are missing from the folder for temporary files."""
        root = temporary_root()
        with suppress(OSError):
            found = KernelCache(root, self.isa)._completed(cached, progress)
            self.note = f"{self.note}; they are in {root} until the system clears it"
            return found
        with scratch_folder() as folder:
            found = KernelCache(folder, self.isa)._completed(cached, progress)
            self.note = f"{self.note}; they are compiled again at every start"
            return found

    def _completed(self, cached: Mapping[str, bytes | None], progress: BuildProgress | None) -> list[bytes]:
        """The units' object files, after those that are missing have been built."""
        with self._alone():
            cached = {unit: body or self.find(unit) for unit, body in cached.items()}
            self._build_all([unit for unit, body in cached.items() if body is None], progress)
        return [body or self._found(unit) for unit, body in cached.items()]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While this lasts no other program builds for the instruction set: what it has begun is waited for,
        not built twice.
        """
        ensure_private(self.root)
        with file_lock(self.root / f"{platform.machine()}-{self.isa.name}.lock", MAX_LOCK_SECONDS):
            yield

    def _build_all(self, units: Sequence[str], progress: BuildProgress | None) -> None:
        if not units:
            return
        count, groups = _Count(len(units), progress), build_groups(units, usable_cpus())
        with ThreadPoolExecutor(max_workers=len(groups)) as pool:
            for done in [pool.submit(self.build, group, count.more) for group in groups]:
                done.result()

    def _found(self, unit: str) -> bytes:
        body = self.find(unit)
        if body is None:
            raise KernelBuildError(f"the kernels {unit} were built but can't be read back from {self.folder}")
        return body


def object_file(folder: str, number: int, unit: str) -> Path:
    """Where a build in `folder` puts a unit for the target of this number."""
    return Path(folder, f"{unit}-{number}.o")


class _Count:
    """How many of `total` units are built; tells `progress`, one thread at a time."""

    def __init__(self, total: int, progress: BuildProgress | None) -> None:
        self._total, self._progress = total, progress
        self._built, self._lock = -1, threading.Lock()
        self.more()

    def more(self) -> None:
        """One more is built."""
        with self._lock:
            self._built += 1
            if self._progress:
                self._progress(self._built, self._total)


def build_groups(units: Sequence[str], processes: int) -> list[list[str]]:
    """Units to build in one process each, so that all take about as long; the longest first."""
    groups: list[list[str]] = [[] for _ in range(min(processes, len(units)))]
    waits = [0.0] * len(groups)
    for unit in sorted(units, key=build_time, reverse=True):
        group = waits.index(min(waits))
        groups[group].append(unit)
        waits[group] += build_time(unit)
    return groups


def build_time(unit: str) -> float:
    """In units of what the rows of a quantized format take."""
    return BUILD_TIMES.get(unit, NEURONS_BUILD_TIME if unit.startswith("neurons_") else 1.0)


class Kernels:
    """Loaded kernels: `kernels.address("rows_Q4_0")`, or called by `kernels.function(name, count)`.

    `note`: what a user should know of how they came about.
    """

    def __init__(self, objects: Iterable[bytes], note: str | None = None) -> None:
        self.note = note
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        for body in objects:
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(body))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """Address of the C function `void name(int64, …)`."""
        found = self.find(name)
        if not found:
            raise KeyError(f"no kernel called {name} has been loaded")
        return found

    def find(self, name: str) -> int:
        """As `address`; 0 if there is none of that name."""
        return int(self._engine.get_function_address(f"edgeinfer_{name}"))

    def function(self, name: str, arguments: int) -> Callable[..., None]:
        """The kernel as a Python callable that takes `arguments` int and lets go of the GIL."""
        prototype: Any = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)
        made: Callable[..., None] = prototype(self.address(name))
        return made


def load_kernels(
    cache_folder: Path,
    isa: InstructionSet,
    units: Iterable[str] = (),
    progress: BuildProgress | None = None,
) -> Kernels:
    """The block kernels and those of `units` (`kernel_units.py`), from the cache or built now."""
    store = KernelCache(cache_folder, isa)
    mark_used(store.folder)
    objects = store.objects([BLOCKS, *units], progress)
    with suppress(OSError):
        if not distrust_reason(cache_folder):
            remove_unused(cache_folder, store.folder)
    return Kernels(objects, store.note)
