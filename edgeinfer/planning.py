"""A plan for a model that isn't loaded: from its file's metadata, for this machine or a described one."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeinfer.catalogue import find_model
from edgeinfer.description.file_sizes import file_sizes
from edgeinfer.errors import OutOfMemoryError, SettingError, UnsupportedModelError
from edgeinfer.language_model import Progress
from edgeinfer.loading.draft_sizes import config_or_remark, draft_sizes
from edgeinfer.loading.gpu_choice import GpuUnavailableError, usable_gpu
from edgeinfer.loading.known_routing import known_routing
from edgeinfer.loading.model_source import DEFAULT_CONTEXT
from edgeinfer.loading.wishes import CHOICES, check_wishes, is_device
from edgeinfer.sizes import parse_bytes
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.cpu.features import choose
from edgeinfer_kernels.cpu.memory import UnsupportedFormatError
from edgeinfer_kernels.cpu.objects import load_kernels
from edgeinfer_kernels.layer_cache import CacheType
from edgeinfer_kernels.model_sizes import ModelSizes
from edgeinfer_offload.machine import Machine
from edgeinfer_offload.machine_description import DescriptionError, describe_machine
from edgeinfer_offload.measure import remembered_threads
from edgeinfer_offload.memory_plan import MemoryPlan, PlanError
from edgeinfer_offload.plan import largest_context, plan_memory
from edgeinfer_offload.plan_facts import PlanWishes
from edgeinfer_offload.this_machine import measure_gpu, unmeasured_machine, with_cpu_speeds, with_gpu
from edgeinfer_quant_formats import GGUFFile
from edgeinfer_quant_formats.errors import printable


@dataclass(frozen=True)
class ModelPlan:
    """The plan of a model, and what a person should know of it."""

    model: str
    plan: MemoryPlan
    notes: tuple[str, ...] = ()


def plan_model(
    model: str | Path | None = None,
    *,
    context: int | None = None,
    device: str = "auto",
    vram: int | str | None = None,
    ram: int | str | None = None,
    threads: int | None = None,
    kv: CacheType = "f16",
    repack: bool = True,
    draft: str | Path | None = "auto",
    build_progress: Progress | None = None,
) -> ModelPlan:
    """Where a model's bytes would lie, and how fast it would answer; nothing of it is loaded.

    `device`: as for `edgeinfer.load`, or a machine's description (see `machine_description.py`). This
    machine's speeds are measured on first use, which takes a few seconds. Other settings as for `load`; a
    `draft` model is placed too, that of "auto" if the model leaves room for it. What main memory can't hold
    stays on the disk.

    Raises:
        UnknownModelError, FormatError, OSError: no such model, or one that can't be read.
        UnsupportedModelError: its file isn't built of attention and feed-forwards.
        SettingError: a setting out of its range, or a description that can't be read.
        OutOfMemoryError: no placement keeps to the budgets; the text says what is missing.
    """
    wished = str(draft) if isinstance(draft, Path) else draft
    check_wishes(context, threads, wished)
    if kv not in CHOICES["kv"]:
        raise SettingError(f"kv: saw {kv!r}, wanted one of {', '.join(map(repr, CHOICES['kv']))}")
    found = find_model(model)
    with GGUFFile.open(found.path) as file:
        config, notes = config_or_remark(file)
        sizes = file_sizes(file, config)
        trained = _trained_context(file)
        drafting, why = draft_sizes(found.draft_path if wished == "auto" else wished, file)
    formats = {matrix.format for matrix in sizes.matrices()}
    machine, note = _machine(device, threads, formats, sizes.nbytes, build_progress)
    only_cpu = machine.graphics is None or device == "cpu"
    routing, remarks = known_routing(found.path, sizes)
    wishes = PlanWishes(
        context=context or min(trained, DEFAULT_CONTEXT),
        kv=kv,
        device="cpu" if only_cpu else "any",
        vram=parse_bytes("vram", vram),
        ram=parse_bytes("ram", ram),
        repack=repack,
        disk=True,
        routing=None if only_cpu else routing,
        changing_experts=not only_cpu,
        draft=None if wished == "auto" else drafting,
    )
    plan = _planned(found.name, sizes, machine, wishes, trained)
    if wished != "auto":
        notes.extend(why)
    elif only_cpu:  # As in loading: on a GPU nothing drafts unless it is asked for.
        if drafting is not None:
            plan, why = _beside_a_draft(plan, sizes, drafting)
        notes.extend(why)
    fitting = largest_context(sizes, machine, wishes, trained) if plan.wishes.disk else 0
    return ModelPlan(found.name, plan, (*notes, *remarks, *note, *load_notes(plan, fitting)))


def _beside_a_draft(plain: MemoryPlan, sizes: ModelSizes, draft: ModelSizes) -> tuple[MemoryPlan, list[str]]:
    """The plan with a draft that nobody asked for, if the model stays where it is without; else as it was."""
    try:
        plan = plan_memory(sizes, plain.machine, replace(plain.wishes, draft=draft))
    except PlanError:
        plan = None
    if plan is None or plan.bytes_on("disk") > plain.bytes_on("disk"):
        return plain, ["drafting by looking back: beside the model there is no room for its draft"]
    return plan, []


def model_sizes(path: Path) -> ModelSizes:
    """The sizes of a file's model; only its metadata is read.

    Raises:
        FormatError, OSError: it can't be read.
        UnsupportedModelError: it isn't built of attention and feed-forwards.
    """
    with GGUFFile.open(path) as file:
        return file_sizes(file, config_or_remark(file)[0])


def _trained_context(file: GGUFFile) -> int:
    key = f"{file.metadata.get('general.architecture')}.context_length"
    value: Any = file.metadata.get(key, DEFAULT_CONTEXT)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(
            f"{printable(key)}: saw {printable(' '.join(repr(value).split()))}, wanted a whole number of at "
            "least 1"
        )
    return value


def _machine(
    device: str, threads: int | None, formats: set[str], model_bytes: int, build_progress: Progress | None
) -> tuple[Machine, list[str]]:
    """The machine to plan for, and a remark if its GPU can't be used."""
    if not is_device(device):
        try:
            return describe_machine(device), []
        except DescriptionError as error:
            raise SettingError(f"device: {error}") from error
    cache = user_folder("cache")
    if threads is None:
        threads = remembered_threads(cache, load_kernels(cache, choose()))
    machine = with_cpu_speeds(unmeasured_machine(threads), cache, formats, model_bytes, build_progress)
    if device == "cpu":
        return machine, []
    try:
        gpu = usable_gpu(device)
    except GpuUnavailableError as error:
        if device != "auto":
            raise
        return machine, [f"planned for the CPU: {error}"]
    if gpu is None:
        return machine, ["planned for the CPU: there is no GPU here"]
    from edgeinfer_kernels.cuda.device_parts import free_bytes

    measure_gpu(gpu, cache, sorted(formats))
    return with_gpu(machine, gpu, free_bytes(gpu.index), cache), []


def _planned(name: str, sizes: ModelSizes, machine: Machine, wishes: PlanWishes, trained: int) -> MemoryPlan:
    try:
        return plan_memory(sizes, machine, wishes)
    except UnsupportedFormatError as error:
        raise UnsupportedModelError(str(error)) from error
    except PlanError as error:
        largest = largest_context(sizes, machine, wishes, trained)
        way_out = f"; with a context of {largest} it fits (--context)" if 0 < largest < wishes.context else ""
        raise OutOfMemoryError(f"{name}: {error}{way_out}") from error


def load_notes(plan: MemoryPlan, fitting: int = 0) -> list[str]:
    """Where loading doesn't do what the plan shows, and what it does instead; `fitting`: the largest context
    with which the machine's memory holds all of the weights.
    """
    notes = []
    if plan.wishes.disk and fitting:
        notes.append(f"loading refuses that: with a context of {fitting} all of it fits (--context)")
    if plan.draft == "gpu" and plan.head != "gpu":
        notes.append("loading keeps the draft of a model that is all on the CPU in main memory")
    return notes
