"""Selects the GPU for a model, without loading anything."""

import importlib.util
from contextlib import suppress

from edgeinfer.errors import EdgeInferError
from edgeinfer.options.device_budgets import device_names
from edgeinfer_kernels.cuda.driver import OLDEST_CAPABILITY, Gpu, list_gpus


class GpuUnavailableError(EdgeInferError):
    """No GPU can run this model; the text has the reason and the solution. With device "auto" the CPU is
    used.
    """


def usable_gpus(device: str) -> tuple[Gpu, ...]:
    """The GPUs of "cuda:0,cuda:1"; of "auto" all that can be used, if any. Raises as `usable_gpu`."""
    several: list[Gpu | None] = []
    if device == "auto":
        for index in range(len(list_gpus())):
            with suppress(GpuUnavailableError):
                several.append(usable_gpu(f"cuda:{index}"))
    found = several or [usable_gpu(name) for name in device_names(device)]
    return tuple(gpu for gpu in found if gpu is not None)


def usable_gpu(device: str) -> Gpu | None:
    """The GPU for `device` ("auto", "cuda", "cuda:N"); None: "auto", and there is no GPU.

    Raises:
        GpuUnavailableError: the GPU can't be used, or the requested one doesn't exist.
    """
    gpus = list_gpus()
    if not gpus:
        if device == "auto":
            return None
        raise GpuUnavailableError(
            f"device: saw {device!r}, but no NVIDIA driver shows a GPU here (see nvidia-smi); "
            "take device='cpu'"
        )
    index = int(device.partition(":")[2] or 0)
    if index >= len(gpus):
        raise GpuUnavailableError(
            f"device: saw {device!r}, wanted cuda:0 to cuda:{len(gpus) - 1} ({len(gpus)} here)"
        )
    gpu = gpus[index]
    if gpu.capability < OLDEST_CAPABILITY:
        raise GpuUnavailableError(
            f"{gpu.name} has compute capability {gpu.capability / 10:.1f}, wanted "
            f"{OLDEST_CAPABILITY / 10:.1f} or newer"
        )
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        raise GpuUnavailableError(f'{gpu.name} needs {" and ".join(missing)}: pip install "edgeinfer[cuda]"')
    return gpu
