"""Compiled kernels: built once per machine in the background, cached, loaded without a compiler.

A unit (see `native/units.py`) becomes a native object file in the cache. Its folder's name is a hash of what
the code is made from: the kernels' sources, the compilers' versions and the instruction set, so that nothing
stale is ever found and no edit elsewhere builds anew; its last 32 bytes are a digest, so that a damaged file
is noticed and built again. Files appear by rename: several programs may start at once. Folders that nobody
uses any more are removed (`kernel_folders.py`).
"""

import ctypes
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from edgeinfer_kernels.cpu.features import InstructionSet, usable_cpus
from edgeinfer_kernels.cpu.kernel_folders import BUILDING, DIGEST_CHARACTERS, mark_used, remove_unused

DIGEST_BYTES = 32
UNITS_A_PROCESS = 3
IMPORTED_BY_NATIVE = ("layout.py", "structures.py")
BuildProgress = Callable[[int, int], None]
"""Called with (units built, units to build); not at all when everything is cached."""


class KernelBuildError(RuntimeError):
    """The compiler process failed; the text ends with what it said last."""


def kernel_sources() -> list[Path]:
    """The files that compiled code is made from: `native` and what it imports."""
    here = Path(__file__).parent
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


class KernelCache:
    """Object files of one instruction set in a folder of their own below `root`."""

    def __init__(self, root: Path, isa: InstructionSet) -> None:
        self.isa = isa
        self.root = root
        self.folder = root / f"{platform.machine()}-{isa.name}-{source_digest(isa)}"

    def find(self, unit: str) -> bytes | None:
        """The unit's object file, or None if there is none or it is damaged."""
        try:
            data = (self.folder / f"{unit}.o").read_bytes()
        except FileNotFoundError:
            return None
        body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
        return body if hashlib.sha256(body).digest() == digest else None

    def build(self, units: Sequence[str]) -> None:
        """Compile units in one process and keep the results; each appears whole or not at all."""
        self.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.root, prefix=BUILDING) as scratch:
            self._compile(units, scratch)
            for unit in units:
                made = Path(scratch, f"{unit}.o")
                body = made.read_bytes()
                made.write_bytes(body + hashlib.sha256(body).digest())
                self.folder.mkdir(exist_ok=True)
                os.replace(made, self.folder / made.name)

    def _compile(self, units: Sequence[str], folder: str) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "NUMBA_CPU_NAME": self.isa.processor,
            "NUMBA_CPU_FEATURES": self.isa.feature_string,
            "NUMBA_OPT": "0",  # functions are optimised once, together, by the build itself
        }
        module, tiles = "edgeinfer_kernels.cpu.native.build_object", "tiles" if self.isa.tiles else "no-tiles"
        command = [sys.executable, "-m", module, tiles, folder, *units]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise KernelBuildError(f"building the {self.isa.name} kernels failed: {last[0]}")

    def objects(self, units: Iterable[str], progress: BuildProgress | None = None) -> list[bytes]:
        """The units' object files; what is missing is built, in as many processes as there are processors."""
        wanted = list(units)
        cached = {unit: self.find(unit) for unit in wanted}
        missing = [unit for unit, body in cached.items() if body is None]
        if missing:
            processes = usable_cpus()
            groups = build_groups(missing, processes)
            done = 0
            if progress:
                progress(0, len(missing))
            with ThreadPoolExecutor(max_workers=min(processes, len(groups))) as pool:
                for finished in as_completed({pool.submit(self._build_group, group) for group in groups}):
                    done += finished.result()
                    if progress:
                        progress(done, len(missing))
        return [cached[unit] or self._found(unit) for unit in wanted]

    def _build_group(self, units: Sequence[str]) -> int:
        self.build(units)
        return len(units)

    def _found(self, unit: str) -> bytes:
        body = self.find(unit)
        if body is None:
            raise KernelBuildError(f"the kernels {unit} were built but can't be read back from {self.folder}")
        return body


def build_groups(units: Sequence[str], processes: int) -> list[list[str]]:
    """Units to build in one process each: `blocks`, which takes as long as a few others, by itself; no more
    than a few together, so that progress can be told.
    """
    alone = [[unit] for unit in units if unit == "blocks"]
    rest = [unit for unit in units if unit != "blocks"]
    share = max(1, processes - len(alone), -(-len(rest) // UNITS_A_PROCESS))
    return alone + [rest[first::share] for first in range(min(share, len(rest)))]


class Kernels:
    """Loaded kernels: `kernels.address("rows_Q4_0")`, or called by `kernels.function(name, count)`."""

    def __init__(self, objects: Iterable[bytes]) -> None:
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
    formats: Iterable[str],
    progress: BuildProgress | None = None,
    sparse_formats: Iterable[str] = (),
) -> Kernels:
    """The block kernels and the row kernels of `formats`, from the cache or built now; with those of a
    sparse feed-forward in `sparse_formats`.
    """
    store = KernelCache(cache_folder, isa)
    mark_used(store.folder)
    objects = store.objects([*unit_names(formats), *sparse_unit_names(sparse_formats)], progress)
    remove_unused(cache_folder, store.folder)
    return Kernels(objects)


def unit_names(formats: Iterable[str]) -> list[str]:
    """The units that a model with matrices of these formats needs."""
    return ["blocks", *(f"rows_{name}" for name in sorted(set(formats)))]


def sparse_unit_names(formats: Iterable[str]) -> list[str]:
    """The units that a sparse feed-forward in these formats needs besides; none without formats."""
    names = [f"neurons_{name}" for name in sorted(set(formats))]
    return ["sparse", *names] if names else []
