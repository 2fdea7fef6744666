"""Which GPU a model may run on, without loading anything for it."""

import importlib.util

from edgeinfer.errors import EdgeInferError
from edgeinfer_kernels.cuda.driver import OLDEST_CAPABILITY, Gpu, list_gpus


class GpuUnavailableError(EdgeInferError):
    """No GPU can run this model; the text says why and what to do. With device "auto" the CPU takes over."""


def usable_gpu(wished: str) -> Gpu | None:
    """The GPU that `wished` ("auto", "cuda", "cuda:N") names; None: "auto", and there is none at all.

    Raises:
        GpuUnavailableError: there is one that can't be used, or not the one that was asked for.
    """
    gpus = list_gpus()
    if not gpus:
        if wished == "auto":
            return None
        raise GpuUnavailableError(
            f"device: saw {wished!r}, but no NVIDIA driver shows a GPU here (nvidia-smi tells more); "
            "take --device cpu"
        )
    index = int(wished.partition(":")[2] or 0)
    if index >= len(gpus):
        raise GpuUnavailableError(
            f"device: saw {wished!r}, wanted cuda:0 to cuda:{len(gpus) - 1} ({len(gpus)} here)"
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
