"""Compiled kernels: built once per machine in the background, cached, loaded without a compiler.

A unit (see `native/units.py`) becomes a native object file in the cache. Its folder's name is a hash of every
kernel source, the compilers' versions and the instruction set, so that nothing stale is ever found; its last
32 bytes are a digest, so that a damaged file is noticed and built again. Files appear by rename: several
programs may start at once.
"""

import ctypes
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from edgeinfer_kernels.cpu.features import InstructionSet

DIGEST_BYTES = 32
BuildProgress = Callable[[int, int], None]
"""Called with (units built, units to build); not at all when everything is cached."""


class KernelBuildError(RuntimeError):
    """The compiler process failed; the text ends with what it said last."""


@cache
def source_digest() -> str:
    """Hash of every kernel source file and of the compilers that turn them into code."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    for package in ("numba", "llvmlite"):
        digest.update(version(package).encode())
    return digest.hexdigest()[:16]


class KernelCache:
    """Object files of one instruction set in a folder."""

    def __init__(self, root: Path, isa: InstructionSet) -> None:
        self.isa = isa
        self.folder = root / f"{platform.machine()}-{isa.name}-{source_digest()}"

    def find(self, unit: str) -> bytes | None:
        """The unit's object file, or None if there is none or it is damaged."""
        try:
            data = (self.folder / f"{unit}.o").read_bytes()
        except FileNotFoundError:
            return None
        body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
        return body if hashlib.sha256(body).digest() == digest else None

    def build(self, unit: str) -> bytes:
        """Compile the unit in a process of its own and keep the result."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            made = Path(scratch) / "unit.o"
            self._compile(unit, made)
            body = made.read_bytes()
            made.write_bytes(body + hashlib.sha256(body).digest())
            os.replace(made, self.folder / f"{unit}.o")
        return body

    def _compile(self, unit: str, out: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "NUMBA_CPU_NAME": self.isa.processor,
            "NUMBA_CPU_FEATURES": self.isa.feature_string,
        }
        command = [sys.executable, "-m", "edgeinfer_kernels.cpu.native.build_object", unit, str(out)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise KernelBuildError(f"building the {self.isa.name} kernels {unit} failed: {last[0]}")

    def objects(self, units: Iterable[str], progress: BuildProgress | None = None) -> list[bytes]:
        """The units' object files; what is missing is built, two at a time."""
        found = {unit: self.find(unit) for unit in units}
        missing = [unit for unit, body in found.items() if body is None]
        if missing:
            if progress:
                progress(0, len(missing))
            with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
                built = zip(missing, pool.map(self.build, missing), strict=True)
                for done, (unit, body) in enumerate(built):
                    found[unit] = body
                    if progress:
                        progress(done + 1, len(missing))
        return [body for body in found.values() if body is not None]


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
        found = self._engine.get_function_address(f"edgeinfer_{name}")
        if not found:
            raise KeyError(f"no kernel called {name} has been loaded")
        return int(found)

    def function(self, name: str, arguments: int) -> Callable[..., None]:
        """The kernel as a Python callable that takes `arguments` int and lets go of the GIL."""
        prototype: Any = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)
        made: Callable[..., None] = prototype(self.address(name))
        return made


def load_kernels(
    cache_folder: Path, isa: InstructionSet, formats: Iterable[str], progress: BuildProgress | None = None
) -> Kernels:
    """The block kernels and the row kernels of `formats`, from the cache or built now."""
    units = ["blocks", *(f"rows_{name}" for name in sorted(set(formats)))]
    return Kernels(KernelCache(cache_folder, isa).objects(units, progress))
