"""The kernels of a decode step of a loaded model on GPUs, as rows of a table."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from edgeinfer.benchmarking.tables import NOTHING
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.model import Model
from edgeinfer_kernels.cuda.tuning.step_profile import (
    KernelRun,
    KernelShare,
    kernel_runs,
    seconds_between_steps,
    step_shares,
)
from edgeinfer_offload.runtime.tensor_backend import TensorBackend

HEAD = ("kernel", "a step", "us each", "us a step", "share")


def share_rows(shares: Sequence[KernelShare]) -> list[list[str]]:
    """A row for each kernel under HEAD, then one of all."""
    whole = sum(share.total_seconds for share in shares)
    rows = [
        [
            share.role,
            str(share.runs),
            f"{share.seconds * 1e6:.1f}",
            f"{share.total_seconds * 1e6:.0f}",
            f"{share.total_seconds / whole:.1%}",
        ]
        for share in shares
    ]
    return [
        *rows,
        ["all", str(sum(share.runs for share in shares)), NOTHING, f"{whole * 1e6:.0f}", "100.0%"],
    ]


def step_rows(model: Model, device: torch.device, work: Callable[[], object]) -> list[list[str]]:
    """The rows of the steps during `work`, of the first rank with tensor parallel, and one from the start of
    a step to that of the next one; empty: no GPU has run any.
    """
    runs = _runs(model, device, work)
    shares = step_shares(runs)
    if not shares:
        return []
    period = seconds_between_steps(runs)
    return [
        *share_rows(shares),
        ["from step to step", NOTHING, NOTHING, f"{period * 1e6:.0f}", NOTHING],
    ]


def _runs(model: Model, device: torch.device, work: Callable[[], object]) -> list[KernelRun]:
    backend: Any = model.engine.backend if isinstance(model.engine, NativeEngine) else None
    if isinstance(backend, TensorBackend):
        backend.call_rank(0, "begin_profile")
        work()
        runs: list[KernelRun] = backend.call_rank(0, "end_profile")
        return runs
    return kernel_runs(device, work) if device.type == "cuda" else []
