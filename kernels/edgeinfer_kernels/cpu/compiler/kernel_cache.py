"""Compiled kernels: built once per machine in the background, cached, loaded without a compiler.

A unit (see `units.py`) is compiled to a native object file in the cache. The folder name is a hash of all
inputs of the code: the kernel sources, the compiler versions and the instruction set. So no stale file is
found, and edits elsewhere do not cause a rebuild. The last 32 bytes of a file are a digest; a damaged file is
detected and built again. Files are created by rename and built under a lock, because several programs may
start at once. Unused folders are removed (`kernel_folders.py`). Code is loaded only from folders and files
that no other user can write (`private_folder.py`). If there is no such folder, or the cache is not writable,
a private temporary folder is used. If that fails too, the missing kernels are built for this program only.
"""

import ctypes
import hashlib
import json
import os
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

from edgeinfer_kernels.cpu.compiler.features import InstructionSet
from edgeinfer_kernels.cpu.compiler.kernel_folders import (
    BUILDING,
    DIGEST_CHARACTERS,
    mark_used,
    remove_unused,
)
from edgeinfer_kernels.system.locks import file_lock
from edgeinfer_kernels.system.private_folder import (
    distrust_reason,
    ensure_private,
    scratch_folder,
    temporary_root,
)
from edgeinfer_kernels.system.processor import architecture, usable_cpus
from edgeinfer_quant_formats import formats

DIGEST_BYTES = 32
BLOCKS = "blocks"
"""The unit that every model needs."""
BUILD_TIMES = {BLOCKS: 3.5, "experts": 1.0, "sparse": 0.5, "sparse_experts": 1.0, "service": 0.1}
BUILD_TIMES |= {f"rows_{name}": 0.1 for name in ("BF16", "F16", "F32")}
NEURONS_BUILD_TIME = 0.3
"""Build time of a unit, relative to the rows of a quantized format."""
MAX_LOCK_SECONDS = 300.0
"""After this time, kernels are built without waiting for another program."""
IMPORTED_BY_NATIVE = (
    *("layout/fields.py", "runtime/abi.py", "runtime/structure.py"),
    *("runtime/kernel_args.py", "runtime/block_args.py", "runtime/encoder_args.py"),
    *("runtime/experts_args.py", "runtime/embedding_args.py"),
    *("runtime/recurrent_args.py", "runtime/gemma3n_args.py", "runtime/disk_args.py"),
    *("compiler/build_object.py", "compiler/pipeline.py", "compiler/units.py"),
)
BuildProgress = Callable[[int, int], None]
"""Callback (units built, units to build), from any thread; not called if everything is cached."""


class KernelBuildError(RuntimeError):
    """The compiler process failed; the message ends with its last output."""


def kernel_sources() -> list[Path]:
    """The source files of the compiled code: `native` and its imports."""
    here = Path(__file__).parents[1]
    native = sorted((here / "native").rglob("*.py"))
    return [*native, *(here / name for name in IMPORTED_BY_NATIVE), Path(str(formats.__file__))]


@cache
def source_digest(isa: InstructionSet) -> str:
    """Hash of the kernel sources, of the compilers, and of their target."""
    digest = hashlib.sha256()
    for path in kernel_sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for package in ("numba", "llvmlite"):
        digest.update(f"{package} {version(package)}\0".encode())
    digest.update(f"{isa.processor} {isa.feature_string}".encode())
    return digest.hexdigest()[:DIGEST_CHARACTERS]


def objects_folder(root: Path, isa: InstructionSet) -> Path:
    """The folder of an instruction set's object files."""
    return root / f"{architecture()}-{isa.name}-{source_digest(isa)}"


class KernelCache:
    """Object files of one instruction set in a subfolder of `root`."""

    def __init__(self, root: Path, isa: InstructionSet) -> None:
        self.isa = isa
        self.root = root
        self.folder = objects_folder(root, isa)
        self.warning: str | None = None
        """A message for the user about the location of the kernels."""

    def find(self, unit: str) -> bytes | None:
        """The unit's object file, or None if it is missing, damaged, or possibly written by another user."""
        path = self.folder / f"{unit}.o"
        try:
            if any(map(distrust_reason, (self.root, self.folder, path))):
                return None
            data = path.read_bytes()
        except OSError:  # Missing or unreadable.
            return None
        body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
        return body if hashlib.sha256(body).digest() == digest else None

    def build(self, units: Sequence[str], built: Callable[[], None]) -> None:
        """Compile units in one process and save the results. Each file is complete or absent; `built` is
        called after each unit.
        """
        with tempfile.TemporaryDirectory(dir=self.root, prefix=BUILDING) as scratch:
            for unit in self.compile(units, scratch):
                self.keep(unit, object_file(scratch, unit))
                built()

    def keep(self, unit: str, made: Path) -> None:
        """Move a unit's object file into the cache, with its digest."""
        body = made.read_bytes()
        made.write_bytes(body + hashlib.sha256(body).digest())
        made.chmod(0o600)
        ensure_private(self.folder)
        os.replace(made, self.folder / f"{unit}.o")

    def compile(self, units: Sequence[str], folder: str) -> Iterator[str]:
        """The units one by one, each as soon as its object file is in the folder."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        isa = self.isa
        target = {"processor": isa.processor, "features": isa.feature_string, "tiles": isa.tiles}
        module = "edgeinfer_kernels.cpu.compiler.build_object"
        command = [sys.executable, "-m", module, folder, json.dumps(target), *units]
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
                raise KernelBuildError(f"building the {isa.name} kernels failed: {last[0]}")

    def objects(self, units: Iterable[str], progress: BuildProgress | None = None) -> list[bytes]:
        """The units' object files; missing ones are built, in as many processes as there are CPUs.

        `warning` then reports their location if it is not the cache folder.
        """
        cached = {unit: self.find(unit) for unit in units}
        if None not in cached.values():
            return [body for body in cached.values() if body is not None]
        try:
            return self._completed(cached, progress)
        except OSError as error:  # The folder is not writable or not trusted, or the disk is full.
            why = f"{error.filename}: {error.strerror}" if error.strerror else str(error)
            self.warning = f"compiled kernels can't be kept: {why}"
            return self._built_in_temporary_folder(cached, progress)

    def _built_in_temporary_folder(
        self, cached: Mapping[str, bytes | None], progress: BuildProgress | None
    ) -> list[bytes]:
        """The units' object files; those missing in the cache come from the temporary folder."""
        root = temporary_root()
        with suppress(OSError):
            paths = KernelCache(root, self.isa)._completed(cached, progress)
            self.warning = f"{self.warning}; they are in {root} until the system clears it"
            return paths
        with scratch_folder() as folder:
            paths = KernelCache(folder, self.isa)._completed(cached, progress)
            self.warning = f"{self.warning}; they are compiled again at every start"
            return paths

    def _completed(self, cached: Mapping[str, bytes | None], progress: BuildProgress | None) -> list[bytes]:
        """The units' object files, after the missing ones have been built."""
        with self._build_lock():
            cached = {unit: body or self.find(unit) for unit, body in cached.items()}
            self._build_all([unit for unit, body in cached.items() if body is None], progress)
        return [body or self._found(unit) for unit, body in cached.items()]

    @contextmanager
    def _build_lock(self) -> Iterator[None]:
        """Within this context, no other program builds for the instruction set: the result of a running build
        is awaited instead of built twice.
        """
        ensure_private(self.root)
        with file_lock(self.root / f"{architecture()}-{self.isa.name}.lock", MAX_LOCK_SECONDS):
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


def object_file(folder: str, unit: str) -> Path:
    """The output file in `folder` for a unit."""
    return Path(folder, f"{unit}.o")


class _Count:
    """Counts how many of `total` units are built; calls `progress` from one thread at a time."""

    def __init__(self, total: int, progress: BuildProgress | None) -> None:
        self._total, self._progress = total, progress
        self._built, self._lock = -1, threading.Lock()
        self.more()

    def more(self) -> None:
        """Count one more unit."""
        with self._lock:
            self._built += 1
            if self._progress:
                self._progress(self._built, self._total)


def build_groups(units: Sequence[str], processes: int) -> list[list[str]]:
    """Groups of units, one per process, with similar build times; the longest first."""
    groups: list[list[str]] = [[] for _ in range(min(processes, len(units)))]
    waits = [0.0] * len(groups)
    for unit in sorted(units, key=build_time, reverse=True):
        group = waits.index(min(waits))
        groups[group].append(unit)
        waits[group] += build_time(unit)
    return groups


def build_time(unit: str) -> float:
    """Build time relative to the rows of a quantized format."""
    return BUILD_TIMES.get(unit, NEURONS_BUILD_TIME if unit.startswith("neurons_") else 1.0)


class Kernels:
    """Loaded kernels: `kernels.address("rows_Q4_0")`, or callable through `kernels.function(name, count)`.

    `warning`: a message for the user about how the kernels were obtained.
    """

    def __init__(self, objects: Iterable[bytes], warning: str | None = None) -> None:
        self.warning = warning
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        for body in objects:
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(body))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """Address of the C function `void name(int64, …)`."""
        pointer = self.find(name)
        if not pointer:
            raise KeyError(f"no kernel called {name} has been loaded")
        return pointer

    def find(self, name: str) -> int:
        """As `address`; 0 if the function does not exist."""
        return int(self._engine.get_function_address(f"edgeinfer_{name}"))

    def function(self, name: str, arguments: int) -> Callable[..., None]:
        """The kernel as a Python callable that takes `arguments` int and releases the GIL."""
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
    return Kernels(objects, store.warning)
