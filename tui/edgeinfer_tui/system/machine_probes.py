"""The machine probes of `doctor`; each calls the module that provides the information."""

import dataclasses
import importlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from edgeinfer_tui.output.doctor_report import Probes
from edgeinfer_tui.versions import version_of

PACKAGES = ("edgeinfer", "numpy", "numba", "llvmlite", "tokenizers", "torch", "triton", "llama-cpp-python")
GPU_QUERY = ("name", "memory.total", "memory.free", "driver_version", "compute_cap")
GPU_QUERY_SECONDS = 10


def probes(threads: int | None) -> Probes:
    """All probes in the order of the report; `threads`: threads for the bandwidth measurement."""
    return {
        "machine": _machine,
        "processor": _processor,
        "memory": _memory,
        "threads": _threads,
        "bandwidth": lambda: bandwidth(threads or usable_cores()),
        "graphics": _graphics,
        "links": _links,
        "versions": _versions,
        "caches": _caches,
    }


def usable_cores() -> int:
    """Number of CPU cores that this process may use."""
    from edgeinfer_kernels.system.processor import allowed_cpus

    return len(allowed_cpus())


def _machine() -> dict[str, Any]:
    return {"system": platform.platform(), "architecture": platform.machine(), "cores": usable_cores()}


def _processor() -> dict[str, Any]:
    """The CPU and the kernels selected for it."""
    features = cast(Any, importlib.import_module("edgeinfer_kernels.cpu.compiler.features")).detect()
    return {
        "name": features.name,
        "active_kernels": f"{features.best.name} ({features.best.summary})",
        "other_kernels": [isa.name for isa in features.available[1:]],
        "features": sorted(features.flags),
    }


def _threads() -> dict[str, Any]:
    """The default number of decode threads, and the reason."""
    from edgeinfer.user_folders import user_folder

    measure = cast(Any, importlib.import_module("edgeinfer_offload.machine.measure"))
    return dataclasses.asdict(measure.select_threads(user_folder("cache")))


def _memory() -> dict[str, Any]:
    from edgeinfer_offload.machine.host_memory import host_memory

    return dataclasses.asdict(host_memory())


def bandwidth(threads: int) -> dict[str, Any]:
    """Memory bandwidth for weights, which limits decode speed."""
    from edgeinfer.user_folders import user_folder

    measure = cast(Any, importlib.import_module("edgeinfer_offload.machine.measure"))
    bytes_per_second = measure.read_bandwidth(user_folder("cache"), threads)
    return {"threads": threads, "read_gigabytes_per_second": round(bytes_per_second / 1e9, 2)}


def _graphics() -> dict[str, Any]:
    """The GPUs, and what is missing to use them."""
    from edgeinfer_tui.system.gpu_support import found_gpu_support, gpu_advice

    return {**_nvidia_gpus(), "support": gpu_advice(found_gpu_support())}


def _nvidia_gpus() -> dict[str, Any]:
    """NVIDIA GPUs as nvidia-smi reports them; importing torch would take seconds."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {"gpus": None}
    result = subprocess.run(
        [tool, f"--query-gpu={','.join(GPU_QUERY)}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=GPU_QUERY_SECONDS,
        check=False,
    )
    if result.returncode:
        return {"gpus": None, "nvidia-smi": (result.stdout + result.stderr).strip()}
    return {f"gpu {index}": line.strip() for index, line in enumerate(result.stdout.splitlines())} or {
        "gpus": None
    }


def _links() -> dict[str, Any]:
    """What connects the GPUs, and what a model over several uses of it."""
    driver = cast(Any, importlib.import_module("edgeinfer_kernels.cuda.driver"))
    count = len(driver.list_gpus())
    if count < 2:
        return {"gpu_pairs": None}
    pairs, nccl = driver.list_links(count), nccl_version()
    shown = {f"gpu {one.first} and {one.second}": _link(one) for one in pairs}
    return {**shown, "nccl": nccl, "layers": "hidden states pass main memory", "tensor": _sums(pairs, nccl)}


def _sums(links: Sequence[Any], nccl: str | None) -> str:
    """What would add up the partial sums of tensor parallel over all GPUs, as far as known without torch."""
    from edgeinfer.user_folders import user_folder

    driver = cast(Any, importlib.import_module("edgeinfer_kernels.cuda.driver"))
    peer_sums = cast(Any, importlib.import_module("edgeinfer_offload.machine.peer_sums"))
    if nccl is None:
        return "unavailable: torch has no NCCL here"
    measured = peer_sums.known_sums(driver.list_gpus(), user_folder("cache"))
    if measured is not None:
        return f"sums by {measured.name}, {1e6 * measured.sum_seconds:.1f} µs each (measured)"
    if all(link.has_access for link in links):
        return "sums by torch's symmetric memory, not measured yet"
    return "sums by NCCL through main memory, not measured yet"


def _link(link: Any) -> str:
    if not link.has_access:
        return "no peer access"
    return "peer access, NVLink" if link.has_atomics else "peer access, PCIe"


def nccl_version() -> str | None:
    """The version of NCCL that torch brings; None: there is none."""
    from importlib.metadata import distributions

    found = (each for each in distributions() if (each.name or "").startswith("nvidia-nccl"))
    return next((f"{each.name} {each.version}" for each in found), None)


def _versions() -> dict[str, Any]:
    return {"python": sys.version.split()[0], **{package: version_of(package) for package in PACKAGES}}


def _caches() -> dict[str, Any]:
    """Paths and sizes of compiled kernels, models and the random files of benchmarks."""
    from edgeinfer.benchmarking.random_files import random_files_folder
    from edgeinfer.registry.registry import default_models_folder
    from edgeinfer.user_folders import user_folder
    from edgeinfer_kernels.cpu.compiler.kernel_folders import kernel_folders

    kernels, models, random_files = user_folder("cache"), default_models_folder(), random_files_folder()
    random_bytes, sets = _size(random_files), kernel_folders(kernels)
    return {
        "kernels": str(kernels),
        "kernels_bytes": sum(folder.nbytes for folder in sets),
        "kernel_sets": [f"{folder.path.name} ({len(folder.units)} units)" for folder in sets],
        "models": str(models),
        "models_bytes": _size(models),
        "random_files": str(random_files),
        "random_files_bytes": random_bytes,
    }


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
