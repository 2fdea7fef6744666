"""What this machine has for GPUs, and in one line what is missing and how to get it. Imports no torch."""

import importlib.util
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

BUILD = re.compile(r"^(cuda|hip)\b[^=\n]*=\s*'([^']*)'", re.MULTILINE)
AMD_DEVICE = Path("/dev/kfd")
TRITON_PACKAGES = ("triton", "triton-windows", "pytorch-triton-rocm")
TORCH_SITE = "pytorch.org/get-started"


@dataclass(frozen=True)
class GpuSupport:
    """What was found. Versions are None for what is missing."""

    system: str = sys.platform
    nvidia_driver: bool = False
    amd_driver: bool = False
    torch: str | None = None
    cuda: str | None = None
    """The CUDA version that torch was built for."""
    hip: str | None = None
    triton: str | None = None


def found_gpu_support(find_tool: Callable[[str], str | None] = shutil.which) -> GpuSupport:
    """What this machine has."""
    builds = torch_builds(_torch_folder())
    return GpuSupport(
        nvidia_driver=find_tool("nvidia-smi") is not None,
        amd_driver=AMD_DEVICE.exists(),
        torch=_version("torch"),
        cuda=builds.get("cuda"),
        hip=builds.get("hip"),
        triton=next(filter(None, map(_version, TRITON_PACKAGES)), None),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch_folder() -> Path | None:
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def torch_builds(folder: Path | None) -> dict[str, str]:
    """ "cuda" or "hip" -> its version, as torch's `version.py` names them; empty for a CPU build."""
    try:
        text = (folder / "version.py").read_text(encoding="utf-8") if folder else ""
    except OSError:
        return {}
    return dict(BUILD.findall(text))


def gpu_advice(found: GpuSupport) -> str:
    """One line: ready, or what is missing and how to get it on this system."""
    if found.system == "darwin":
        return (
            "Apple's GPUs have no kernels here: the CPU is used; --engine llama.cpp takes its Metal build "
            "(pip install 'edgeinfer[llama-cpp]')"
        )
    if not (found.nvidia_driver or found.amd_driver):
        return "no GPU driver (nvidia-smi; on Linux /dev/kfd): the CPU is used; CUDA needs NVIDIA's driver"
    if found.torch is None:
        return f"PyTorch is missing: {_torch_command(found)}"
    if found.nvidia_driver and found.cuda is None:
        return f"torch {found.torch} is not built for CUDA: {_torch_command(found)}"
    if not found.nvidia_driver and found.hip is None:
        return f"torch {found.torch} is not built for ROCm: {_torch_command(found)}"
    if found.triton is None:
        package = "triton-windows" if found.system == "win32" else "triton"
        return f"Triton is missing: pip install {package}"
    kind = f"CUDA {found.cuda}" if found.nvidia_driver else f"ROCm {found.hip} (experimental, not run by us)"
    return f"ready: torch {found.torch} for {kind}, Triton {found.triton}"


def _torch_command(found: GpuSupport) -> str:
    if not found.nvidia_driver:
        return f"{TORCH_SITE} has the command for ROCm; then pip install 'edgeinfer[cuda]'"
    if found.system == "win32":  # the package index has torch without CUDA for Windows
        return f"{TORCH_SITE} has the command for Windows and CUDA; then pip install 'edgeinfer[cuda]'"
    return "pip install --force-reinstall torch" if found.torch else "pip install 'edgeinfer[cuda]'"
