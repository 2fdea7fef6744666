"""What a fitted file must reach: a size, bits per weight, or a speed; and the cost of each format."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgeinfer.errors import SettingError
from edgeinfer.options.device_budgets import parse_bytes
from edgeinfer.planning.model_plan import plan_model
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.system.processor import usable_cpus
from edgeinfer_offload.machine.this_machine import unmeasured_machine, with_cpu_speeds
from edgeinfer_quant_formats import FormatSpec, GGUFFile
from edgeinfer_quant_formats.gguf.tensor_index import TensorInfo
from edgeinfer_quant_formats.quantizer.tensor_roles import OUTPUT, TOKEN_EMBEDDINGS

Cost = Callable[[TensorInfo, FormatSpec], float]
EXPERTS = re.compile(r"_exps\.")


@dataclass(frozen=True)
class Goal:
    """The kind and the value of a limit: bytes of the file, bits per weight, or decoded tokens per second."""

    kind: Literal["bytes", "bits", "speed"]
    value: float

    def __str__(self) -> str:
        unit = {"bytes": "bytes", "bits": "bits per weight", "speed": "tokens/s"}[self.kind]
        return f"{self.value:,g} {unit}" if self.kind != "bytes" else f"{int(self.value):,} {unit}"


def goal_of(
    fit: int | str | None, bits_per_weight: float | None, tokens_per_second: float | None
) -> Goal | None:
    """The goal of the options; None: there is none.

    Raises:
        SettingError: two goals, or a value out of its range.
    """
    given: list[tuple[Literal["bytes", "bits", "speed"], float | None]] = [
        ("bytes", parse_bytes("fit", fit)), ("bits", bits_per_weight), ("speed", tokens_per_second),
    ]  # fmt: skip
    goals = [Goal(kind, value) for kind, value in given if value is not None]
    if len(goals) > 1:
        raise SettingError(f"fit, bpw and tokens-per-second: saw {len(goals)} of them, wanted one goal")
    if goals and not 0 < goals[0].value < float("inf"):
        raise SettingError(f"goal: saw {goals[0]}, wanted more than 0")
    return goals[0] if goals else None


@dataclass(frozen=True)
class Budget:
    """What the tensors may cost in total, and the cost of one in a format."""

    total: float
    cost: Cost


def byte_budget(file: GGUFFile, goal: Goal) -> Budget:
    """The bytes that a size or bits per weight leave to the tensors."""
    if goal.kind == "bits":
        weights = sum(info.nbytes // info.format.block_bytes * info.format.block_elements
                      for info in file.tensors.values())  # fmt: skip
        return Budget(goal.value * weights / 8, lambda info, spec: spec.nbytes(info.shape))
    alignment = file.alignment
    # What isn't weights, as large as in the source: metadata and names.
    overhead = max(sum(part.stat().st_size for part in file.parts) - file.nbytes, 0)
    return Budget(
        goal.value - overhead, lambda info, spec: -(-spec.nbytes(info.shape) // alignment) * alignment
    )


def speed_budget(model: str | Path | None, file: GGUFFile, goal: Goal, formats: Sequence[str]) -> Budget:
    """The seconds per token that a speed leaves to reading weights, by the planner's rates: those of the GPU
    if this machine has one, else those of the CPU, which are measured on first use.
    """
    plan = plan_model(model).plan
    graphics = plan.machine.graphics
    rate: Callable[[str], float]
    if plan.placement == "gpu" and graphics is not None:
        rate = graphics.rate
    else:
        own = {info.format.name for info in file.tensors.values()}
        machine = with_cpu_speeds(
            unmeasured_machine(usable_cpus()), user_folder("cache"), {*formats, *own}, file.nbytes
        )
        rate = machine.processor.rate
    share = _read_share(file)

    def seconds(info: TensorInfo, spec: FormatSpec) -> float:
        return float(share(info) * spec.nbytes(info.shape) / rate(spec.name))

    reading = sum(seconds(info, info.format) for info in file.tensors.values())
    other = max(plan.prediction.seconds - reading, 0.0)
    return Budget(1 / goal.value - other, seconds)


def _read_share(file: GGUFFile) -> Callable[[TensorInfo], float]:
    """The share of a tensor that is read for a token: rows of embeddings and experts are few."""
    architecture = file.metadata.get("general.architecture")
    used = file.metadata.get(f"{architecture}.expert_used_count", 1)

    def share(info: TensorInfo) -> float:
        if info.name in TOKEN_EMBEDDINGS and (OUTPUT in file.tensors or info.name != TOKEN_EMBEDDINGS[0]):
            return 1 / info.shape[0]
        return float(used) / info.shape[0] if EXPERTS.search(info.name) else 1.0

    return share
