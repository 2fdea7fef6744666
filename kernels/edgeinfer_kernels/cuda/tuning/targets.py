"""Compiles kernels for GPUs that are not present, and reports registers, spills and shared memory."""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGETS = (75, 80, 86, 89, 90, 100, 120)
OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg")
LANES = 32
_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_AMD_USAGE = re.compile(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class Launch:
    """A kernel launch: its arguments by name, without values that do not affect compilation."""

    kernel: Any
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    aligned: tuple[tuple[int, ...], ...]
    """Arguments that are multiples of 16: their position, and the positions within tuples."""
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """The name of the kernel."""
        return str(self.kernel.__name__)

    @property
    def key(self) -> str:
        """Equal for launches that compile to the same binary."""
        constants = sorted((path, str(value)) for path, value in self.constants.items())
        return str((self.name, self.signature, constants, self.aligned, self.options))


@dataclass(frozen=True)
class Resources:
    """Resources of a program of a compiled kernel; spilled bytes are per thread."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    warps: int
    dependent: bool
    """Whether it has the instructions of programmatic dependent launch."""


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Within this context nothing runs on a GPU: launches are recorded in the list, each kind once."""
    recorded: dict[str, Launch] = {}
    launches: list[Launch] = []
    original = JITFunction.run

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        launch = _launch(kernel, arguments, keywords)
        if launch.key not in recorded:
            recorded[launch.key] = launch
            launches.append(launch)

    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = original


def _launch(kernel: Any, arguments: Sequence[Any], keywords: dict[str, Any]) -> Launch:
    options = tuple((name, keywords.pop(name)) for name in OPTIONS if name in keywords)
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | keywords
    signature: dict[str, Any] = {}
    compiled = _Compiled()
    for position, parameter in enumerate(kernel.params):
        value = values.get(parameter.name, parameter.default)
        free = parameter.do_not_specialize
        signature[parameter.name] = compiled.add((position,), value, free, parameter.is_constexpr)
    return Launch(kernel, signature, compiled.constants, tuple(compiled.aligned), options)


class _Compiled:
    """Constants and alignments of the arguments of a launch; an argument is identified by its path."""

    def __init__(self) -> None:
        self.constants: dict[tuple[int, ...], Any] = {}
        self.aligned: list[tuple[int, ...]] = []

    def add(self, path: tuple[int, ...], value: Any, free: bool, is_constant: bool) -> Any:
        """Add an argument; return its type, for a tuple those of its elements. `free`: not specialized."""
        if isinstance(value, tuple) and not is_constant:
            kinds = [self.add((*path, at), each, free, False) for at, each in enumerate(value)]
            return type(value)(*kinds) if hasattr(value, "_fields") else tuple(kinds)
        is_one = isinstance(value, int) and not isinstance(value, bool) and value == 1
        # An integer 1 is a compile-time constant, unless the kernel disables that.
        if is_constant or value is None or (is_one and not free):
            self.constants[path] = value
            return "constexpr"
        if not free and _is_aligned(value):
            self.aligned.append(path)
        return _kind_of(value)


def _kind_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _is_aligned(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value.storage_offset() * value.element_size() % 16 == 0)
    return isinstance(value, int) and not isinstance(value, bool) and value % 16 == 0


def compile_for_amd(launch: Launch, architecture: str) -> Resources:
    """Compile a recorded launch for an AMD GPU such as gfx1100: neither the GPU nor ROCm is needed, but a
    process whose kernels are for AMD (`compile_target.HAS_HIP`).
    """
    options = {name: value for name, value in launch.options if name != "launch_pdl"}
    lanes = 64 if architecture.startswith("gfx9") else LANES
    compiled = triton.compile(_source(launch), target=GPUTarget("hip", architecture, lanes), options=options)
    text = compiled.asm["amdgcn"]
    values = {name: int(value) for name, value in _AMD_USAGE.findall(text)}
    shared, warps = int(compiled.metadata.shared), int(compiled.metadata.num_warps)
    return Resources(values["vgpr_count"], values["private_segment_fixed_size"], shared, warps, False)


def _source(launch: Launch) -> ASTSource:
    attributes = {path: [["tt.divisibility", 16]] for path in launch.aligned}
    return ASTSource(launch.kernel, launch.signature, launch.constants, attributes)


def compile_launch(launch: Launch, capability: int) -> Resources:
    """Compile a recorded launch for sm_`capability`, with Triton's assembler: no GPU is needed.

    Dependent launch is omitted below sm_90, which does not support it.
    """
    options = dict(launch.options)
    if capability < 90:
        options.pop("launch_pdl", None)
    compiled = triton.compile(_source(launch), target=GPUTarget("cuda", capability, LANES), options=options)
    registers, spilled = _usage(compiled.asm["cubin"])
    dependent = "griddepcontrol" in compiled.asm["ptx"]
    shared, warps = int(compiled.metadata.shared), int(compiled.metadata.num_warps)
    return Resources(registers, spilled, shared, warps, dependent)


def _usage(binary: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of local memory and stack per thread."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary)
        tool = triton.knobs.nvidia.cuobjdump.path
        command = [tool, "--dump-resource-usage", str(path)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = _USAGE.search(printed)
    if usage is None:
        raise RuntimeError(f"cuobjdump: saw {printed!r}, wanted a line with REG, STACK, SHARED and LOCAL")
    registers, stack, _, local = map(int, usage.groups())
    return registers, stack + local
