"""Plans a model without loading it: from its metadata, for this machine or a described one."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from edgeinfer.errors import Detail, NotPulledError, OutOfMemoryError, SettingError, UnsupportedModelError
from edgeinfer.hugging_face.opening import open_file
from edgeinfer.loading.draft_file import NO_MODELS, DraftTarget, open_draft
from edgeinfer.loading.model_source import DEFAULT_CONTEXT, ModelSource
from edgeinfer.model_config.config import ModelConfig
from edgeinfer.model_config.file_sizes import file_sizes
from edgeinfer.model_config.support import model_support, open_model
from edgeinfer.model_config.weights import read_config
from edgeinfer.options import LoadKeywords, LoadOptions
from edgeinfer.options.device_budgets import is_device
from edgeinfer.planning.absent_model import ModelHeader, absent_model, shape_model
from edgeinfer.planning.device_plan import plan_devices, with_one_gib_more
from edgeinfer.planning.gpu_selection import GpuUnavailableError, usable_gpus
from edgeinfer.planning.model_request import request_for
from edgeinfer.planning.plan_request import PlanRequest
from edgeinfer.planning.sparse_selection import select_sparse_layers
from edgeinfer.registry.model_file import ModelFile
from edgeinfer.registry.registry import find_model
from edgeinfer.speculation.draft_vocabulary import short_note, short_vocabulary
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.cpu.layout.packed_matrix import UnsupportedFormatError
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.machine.description import DescriptionError, describe_machine
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.machine.measure import measured_threads
from edgeinfer_offload.machine.peer_sums import expected_sums
from edgeinfer_offload.machine.this_machine import (
    measure_gpu,
    unmeasured_machine,
    with_cpu_speeds,
    with_disk_speed,
    with_gpus,
)
from edgeinfer_offload.planner.memory_plan import MemoryPlan
from edgeinfer_offload.report.plan_curve import PlanCurve, plan_curve
from edgeinfer_quant_formats import GGUFFile
from edgeinfer_quant_formats.errors import printable


@dataclass(frozen=True)
class ModelPlan:
    """The plan of a model, and warnings for the user; of these a `Detail` reports no problem."""

    model: str
    plan: MemoryPlan
    request: PlanRequest
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The model's name and its plan as JSON-compatible values."""
        return {"model": self.model, **self.plan.to_dict()}

    def curve(self) -> PlanCurve:
        """The speed on the same machine over batch size and context length."""
        return plan_curve(self.request.sizes, self._for_context, self.request.trained_context)

    def _for_context(self, context: int) -> MemoryPlan | None:
        try:
            return plan_devices(replace(self.request, context=context), self.plan.machine).memory
        except (OutOfMemoryError, GpuUnavailableError):
            return None


def plan_model(model: str | Path | None = None, **options: Unpack[LoadKeywords]) -> ModelPlan:
    """Plan the placement of a model's bytes and predict its speed; no weights are loaded.

    `options`: as for `edgeinfer.load`, which uses the same placement. `device` may also be a machine's
    description (see `machine/description.py`). The speeds of this machine are measured on first use, which
    takes a few seconds. A `draft` model is placed too; that of "auto" only if the model leaves memory for it.
    Weights that main memory can't hold at any context stay on disk.

    Raises:
        UnknownModelError, FormatError, OSError: no such model, or one that can't be read.
        UnsupportedModelError: its file isn't built of attention and feed-forwards.
        SettingError: a setting out of its range, or an invalid description.
        OutOfMemoryError: no placement fits the budgets; the text has the missing bytes.
    """
    device, load_options = _device(options)
    try:
        model_file = find_model(model)
    except NotPulledError as missing:
        with absent_model(missing) as header:
            return _planned_header(header, device, load_options)
    with open_model(model_file.path, model_file.name) as file:
        request, warnings, note = _request(model_file, file, load_options)
    return _planned(request, warnings, device, load_options, note, model_file.path)


def plan_shape(shape: str, quant: str = "", **options: Unpack[LoadKeywords]) -> ModelPlan:
    """As `plan_model`, of a known shape in a type; it needs no file and no network.

    Raises: as `plan_model`; `SettingError` also for an unknown shape or type.
    """
    device, load_options = _device(options)
    return _planned_header(shape_model(shape, quant), device, load_options)


def _device(options: LoadKeywords) -> tuple[str, LoadOptions]:
    """The device or the description of a machine, and the options with a device."""
    device = options.get("device", "auto")
    if not is_device(device):
        options["device"] = "auto"
    return device, LoadOptions.from_keywords(options)


def _planned_header(header: ModelHeader, device: str, options: LoadOptions) -> ModelPlan:
    request = _header_request(header, options)
    return _planned(request, [header.note] if header.note else [], device, options)


DENSE_NOTE = Detail("sparse feed-forwards on the CPU would not be faster here: all are dense")


def _planned(
    request: PlanRequest,
    warnings: Sequence[str],
    device: str,
    load_options: LoadOptions,
    sparse_note: str | None = None,
    path: Path | None = None,
) -> ModelPlan:
    """`sparse_note`: for the user if the request's layers are sparse, or can't be. `path`: of its file."""
    is_on_cpu = request.device == "cpu" and is_device(device)
    machine, more = _machine("cpu" if is_on_cpu else device, load_options, request.sizes)
    try:
        planned = plan_devices(request, machine, lambda seen: _with_disk_speed(seen, path))
    except UnsupportedFormatError as error:
        raise UnsupportedModelError(str(error)) from error
    plan = with_one_gib_more(request, machine, planned)
    if sparse_note and plan.options.sparse != request.sparse:
        sparse_note = None if request.sparse_required else DENSE_NOTE
    notes = [*([sparse_note] if sparse_note else []), *_vocabulary_notes(request, plan)]
    return ModelPlan(request.name, plan, request, (*warnings, *notes, *more, *planned.warnings))


def _vocabulary_notes(request: PlanRequest, plan: MemoryPlan) -> list[str]:
    """The short vocabulary of a planned draft head, if it has one, as heads on the CPU may."""
    head = request.draft
    if plan.draft != "cpu" or head is None or not head.drafts_pairs:
        return []
    size = short_vocabulary(request.sizes.vocabulary, head.vocabulary)
    return [Detail(short_note("draft head", size))] if size else []


def _with_disk_speed(machine: Machine, path: Path | None) -> Machine:
    """The machine with the speed of the file's disk, if it is this one and there is a file."""
    if path is None or machine.origin != "measured":
        return machine
    return with_disk_speed(machine, user_folder("cache"), path)


def plan_on_machines(
    devices: Sequence[str], plan_on: Callable[[str], ModelPlan]
) -> dict[str, MemoryPlan | str]:
    """For each machine that `devices` describe the plan that `plan_on` returns, or why the model doesn't fit.

    Raises: as `plan_on`, but for `OutOfMemoryError`; and `SettingError` for a device of this machine.
    """
    plans: dict[str, MemoryPlan | str] = {}
    for device in devices:
        if is_device(device):
            raise SettingError(
                f"device: saw {device!r} among several, wanted descriptions of machines, as 'rtx 4060 laptop'"
            )
        try:
            plans[device] = plan_on(device).plan
        except OutOfMemoryError as error:
            plans[device] = str(error)
    return plans


def _request(
    model_file: ModelFile, file: GGUFFile, options: LoadOptions
) -> tuple[PlanRequest, list[str], str | None]:
    """The planner request that `load` would make, as far as the file's model is supported; warnings; and a
    note on sparse layers.
    """
    config: ModelConfig | None = None
    with suppress(UnsupportedModelError):
        config = read_config(file)
    draft, warnings = open_draft(options.draft, DraftTarget.of(model_file, file, config))
    sizes = draft.sizes if draft else None
    if draft is not None:
        draft.close()
    if config is None:
        request = _unsupported_request(model_file.name, file, options, sizes)
        return request, [str(model_support(file)), *warnings], None
    source = ModelSource(model_file.name, file, config, options)
    if source.config.is_encoder:
        return request_for(source), [], None
    sparse = select_sparse_layers(source)
    return request_for(source, sparse, sizes), list(warnings), sparse.note


def _header_request(header: ModelHeader, options: LoadOptions) -> PlanRequest:
    """The planner request of a model without weights, and without a draft model. Raises `SettingError`: one
    was requested.
    """
    if options.draft not in ("auto", *NO_MODELS):
        raise SettingError(
            f"draft: saw {str(options.draft)!r}, but the vocabulary of {header.name} isn't known; pull the "
            "model, or leave draft= out"
        )
    try:
        config = read_config(header.file)
    except UnsupportedModelError:
        return _unsupported_request(header.name, header.file, options, None)
    sizes = file_sizes(header.file, config)
    source = ModelSource(header.name, header.file, config, options, known_sizes=sizes)
    has_head = options.draft in ("auto", "mtp")
    head, _ = (
        open_draft(options.draft, DraftTarget(header.name, header.file, config)) if has_head else (None, ())
    )
    return request_for(source, draft=head.sizes if head else None, has_file=False)


def _unsupported_request(
    name: str, file: GGUFFile, options: LoadOptions, draft: ModelSizes | None
) -> PlanRequest:
    """The request of a model that only another engine can run. Raises `UnsupportedModelError`."""
    trained = _trained_context(file)
    try:
        sizes = file_sizes(file, None)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name}: {model_support(file)}; no plan: {error}") from error
    return PlanRequest(
        name=name,
        sizes=sizes,
        context=options.context or min(trained, DEFAULT_CONTEXT),
        trained_context=trained,
        device=options.device.partition(":")[0],
        vram=options.vram_budgets[0],
        vram_of_each=options.vram_budgets,
        ram=options.ram,
        kv=options.kv,
        repack=options.repack,
        draft=draft,
        draft_required=draft is not None and options.draft != "auto",
    )


def model_sizes(path: Path) -> ModelSizes:
    """The sizes of a file's model; only its metadata is read.

    Raises:
        FormatError, OSError: it can't be read.
        UnsupportedModelError: it isn't built of attention and feed-forwards.
    """
    with open_file(path) as file:
        return sizes_of(file)


def sizes_of(file: GGUFFile) -> ModelSizes:
    """As `model_sizes`, of an open file."""
    try:
        config = read_config(file)
    except UnsupportedModelError:
        config = None
    return file_sizes(file, config)


def usual_context(file: GGUFFile) -> int:
    """The default context for planning and loading a model. Raises as `model_sizes` does."""
    return min(_trained_context(file), DEFAULT_CONTEXT)


def _trained_context(file: GGUFFile) -> int:
    key = f"{file.metadata.get('general.architecture')}.context_length"
    value: Any = file.metadata.get(key, DEFAULT_CONTEXT)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(
            f"{printable(key)}: saw {printable(' '.join(repr(value).split()))}, wanted a whole number of at "
            "least 1"
        )
    return value


def described_machine(text: str) -> Machine:
    """The machine that a text describes. Raises `SettingError`."""
    try:
        return describe_machine(text)
    except DescriptionError as error:
        raise SettingError(f"device: {error}") from error


def _machine(device: str, options: LoadOptions, sizes: ModelSizes) -> tuple[Machine, list[str]]:
    """The machine to plan for, and a warning if its GPU can't be used."""
    if not is_device(device):
        return described_machine(device), []
    cache, formats = user_folder("cache"), sizes.formats
    threads = options.threads or measured_threads(cache, options.build_progress)
    machine = unmeasured_machine(threads)
    machine = with_cpu_speeds(machine, cache, formats, sizes.nbytes, options.build_progress)
    if device == "cpu":
        return machine, []
    try:
        gpus = usable_gpus(device)
    except GpuUnavailableError as error:
        if device != "auto":
            raise
        return machine, [f"planned for the CPU: {error}"]
    if not gpus:
        return machine, [Detail("no NVIDIA GPU here")]
    from edgeinfer_kernels.cuda.device_parts import free_bytes

    for gpu in gpus:
        measure_gpu(gpu, cache, sorted(formats))
    free = {gpu: free_bytes(gpu.index) for gpu in gpus}
    return with_gpus(machine, free, cache, expected_sums(gpus, cache)), []
