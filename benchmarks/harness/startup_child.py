"""A program that starts, loads a model, evaluates a token and prints the time of each; see `startup.py`."""

import time

BEGAN = time.time()

import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402


class _Timed:
    """A function that records its duration."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return self._function(*arguments, **named)
        finally:
            self.seconds += time.perf_counter() - begin


def main(model: str, spawned: float) -> None:
    """Print the phases as JSON; `spawned`: when the parent started this process, by its clock."""
    import edgeinfer
    from edgeinfer.loading import engine_building
    from edgeinfer_kernels.cpu.compiler.kernel_cache import load_kernels
    from edgeinfer_offload.machine.peak_memory import peak_resident_bytes

    imported = time.time()
    kernels = _Timed(load_kernels)
    vars(engine_building)["load_kernels"] = kernels
    loaded = edgeinfer.load(model, device="cpu", draft=None)
    ready = time.time()
    loaded.engine.append([1])
    done = time.time()
    peak = peak_resident_bytes()
    print(
        json.dumps(
            {
                "interpreter": BEGAN - spawned,
                "imports": imported - BEGAN,
                "kernels": kernels.seconds,
                "weights": ready - imported - kernels.seconds,
                "first_token": done - ready,
                "total": done - spawned,
                "peak_resident_bytes": peak,
                "planned_bytes": 0 if loaded.plan is None else loaded.plan.nbytes,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
