"""From a name to a model that answers: find the file, plan its memory, load an engine."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from edgeinfer.catalogue import ModelFile, find_model
from edgeinfer.chat_format import ChatFormat
from edgeinfer.errors import (
    EdgeInferError,
    KernelError,
    OutOfMemoryError,
    SettingError,
    UnsupportedModelError,
)
from edgeinfer.kv_cache import KVCache
from edgeinfer.language_model import Progress
from edgeinfer.memory_items import cache_items, largest_context, weight_items, workspace_item
from edgeinfer.model import Model
from edgeinfer.model_config import ModelConfig
from edgeinfer.model_weights import embedding_rows, read_weights, rope_factors
from edgeinfer.sizes import parse_bytes
from edgeinfer.tokenizer import Tokenizer
from edgeinfer.transformer import Transformer
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.backend import CacheType
from edgeinfer_kernels.cpu.backend import CpuBackend, kernel_formats
from edgeinfer_kernels.cpu.features import UnsupportedProcessorError, choose
from edgeinfer_kernels.cpu.memory import UnsupportedFormatError
from edgeinfer_kernels.cpu.objects import KernelBuildError, load_kernels
from edgeinfer_kernels.specification import DecoderSpecification
from edgeinfer_kernels.weights import DecoderWeights, Matrix
from edgeinfer_offload.host_memory import host_memory
from edgeinfer_offload.measure import remembered_bandwidth, remembered_threads
from edgeinfer_offload.plan import Device, Item, MemoryPlan, PlanError, Repacking, plan_memory
from edgeinfer_quant_formats import GGUFFile

DEFAULT_CONTEXT = 4096
BATCH = 256
"""Tokens of a prompt that are read in one step."""
MOST_THREADS = 1024
EngineName = Literal["edgeinfer", "llama.cpp"]
CHOICES: dict[str, tuple[Any, ...]] = {
    "device": ("auto", "cpu"),
    "kv": ("f16", "f32"),
    "draft": ("auto", None),
    "engine": ("edgeinfer", "llama.cpp"),
}


@dataclass(frozen=True)
class Wishes:
    """What the caller of `load` asked for, checked."""

    context: int | None
    device: str
    ram: int | None
    """Bytes of main memory to use at most."""
    threads: int | None
    repack: bool
    instruction_set: str | None
    draft: str | None
    kv: CacheType
    engine: EngineName
    chat_template: str | None
    assume_pre_tokenizer: str | None
    progress: Progress | None
    build_progress: Progress | None

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                shown = ", ".join("None" if choice is None else repr(choice) for choice in choices)
                raise SettingError(f"{name}: saw {value!r}, wanted one of {shown}")
        for name in ("context", "threads"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise SettingError(f"{name}: saw {value!r}, wanted a whole number of at least 1, or None")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise SettingError(f"threads: saw {self.threads}, wanted {MOST_THREADS} at most")
        if not isinstance(self.repack, bool):
            raise SettingError(f"repack: saw {self.repack!r}, wanted True or False")
        if self.engine == "llama.cpp" and not self.repack:
            raise SettingError("repack: llama.cpp decides that by itself; leave it out, or the engine")
        if self.engine == "llama.cpp" and self.ram is not None:
            raise SettingError("ram: llama.cpp keeps to no budget; leave it out, or the engine")


def load(
    model: str | Path | None = None,
    *,
    context: int | None = None,
    device: str = "auto",
    vram: int | str | None = None,
    ram: int | str | None = None,
    threads: int | None = None,
    repack: bool = True,
    instruction_set: str | None = None,
    draft: str | None = "auto",
    kv: CacheType = "f16",
    engine: EngineName = "edgeinfer",
    chat_template: str | None = None,
    assume_pre_tokenizer: str | None = None,
    progress: Progress | None = None,
    build_progress: Progress | None = None,
) -> Model:
    """Load a model: a name in the catalogue, a path to a .gguf file, or nothing for the built-in one.

    `context`: tokens of prompt and answer together; None: what the model was trained for, 4096 at most.
    `vram`, `ram`: budgets in bytes or as "8GiB"; None: what is free now. `threads` None: as many as read
    memory fastest, measured once. `repack` False: leave the weights in the file's memory map, which takes
    next to no memory of our own; answers then come at about a third of the speed, prompts are read as fast.
    `instruction_set`: one that `edgeinfer doctor` lists; None: the best.
    `chat_template`: Jinja text in place of the file's. `assume_pre_tokenizer`: go on with this
    one where the file's is unknown. `progress` hears of bytes loaded, `build_progress` of kernels compiled
    (first use only).

    Raises:
        UnknownModelError: no such name or file.
        UnsupportedModelError: the file holds what edgeinfer doesn't run; the text names the way out.
        OutOfMemoryError: it doesn't fit; the text has both numbers and a context that would.
        SettingError: a setting out of its range.
        ChatTemplateError: `chat_template`, or the file's choice of one, leads nowhere.
        KernelError: this machine can't build or run the kernels.
        FormatError: a damaged file.
        OSError: the file can't be opened, or the folder of compiled kernels can't be written.
    """
    wishes = Wishes(
        context=context,
        device=device,
        ram=parse_bytes("ram", ram),
        threads=threads,
        repack=repack,
        instruction_set=instruction_set,
        draft=draft,
        kv=kv,
        engine=engine,
        chat_template=chat_template,
        assume_pre_tokenizer=assume_pre_tokenizer,
        progress=progress,
        build_progress=build_progress,
    )
    parse_bytes("vram", vram)
    found = find_model(model)
    if wishes.engine == "llama.cpp":
        from edgeinfer.llama_cpp_engine import load_llama_cpp

        return load_llama_cpp(found, wishes.context, wishes.threads, wishes.chat_template, wishes.kv)
    file = GGUFFile.open(found.path)
    try:
        return _load_own(found, file, wishes)
    except BaseException as error:
        file.close()
        for_people = _explained(error, found.name)
        if for_people is None:
            raise
        raise for_people from error


def _explained(error: BaseException, name: str) -> EdgeInferError | None:
    """What a failure of the lower floors means to who loads a model; None: it speaks for itself."""
    if isinstance(error, UnsupportedFormatError):
        return UnsupportedModelError(f"{error}; llama.cpp may run it: add --engine llama.cpp")
    if isinstance(error, UnsupportedProcessorError | KernelBuildError):
        return KernelError(str(error))
    if isinstance(error, MemoryError):
        return OutOfMemoryError(
            f"{name}: the system gave no more memory; close programs, or take a smaller context or model"
        )
    return None


def _load_own(found: ModelFile, file: GGUFFile, wishes: Wishes) -> Model:
    config = ModelConfig.from_metadata(file.metadata, embedding_rows(file))
    context = wishes.context or min(config.trained_context, DEFAULT_CONTEXT)
    specification = config.specification(rope_factors(file, config, context))
    weights = read_weights(file, config)
    tokenizer = _tokenizer(file, config, wishes.assume_pre_tokenizer)
    chat_format = _chat_format(file, tokenizer, wishes.chat_template)
    isa = choose(wishes.instruction_set)
    needs = _Needs(
        specification, weights, context, wishes.kv, wishes.threads or 1, config.trained_context, wishes.repack
    )
    # Refused here, before kernels are compiled, if it won't fit whatever the number of threads.
    needs.plan(_budget(wishes.ram), found.name)
    kernels = load_kernels(user_folder("cache"), isa, kernel_formats(weights), wishes.build_progress)
    threads = wishes.threads or remembered_threads(user_folder("cache"), kernels)
    needs = replace(needs, threads=threads)
    plan = needs.plan(_budget(wishes.ram), found.name)
    cache = KVCache(specification, context, wishes.kv)
    placing = _Placing(file, weights, wishes.progress)
    backend = CpuBackend(
        specification,
        weights,
        cache.layers,
        kernels,
        batch=BATCH,
        threads=threads,
        repack=wishes.repack,
        on_placed=placing,
    )
    repacking = Repacking(backend.repacked_bytes, backend.repack_seconds, placing.released)
    return Model(
        name=found.name,
        engine=Transformer(specification, backend, cache, BATCH, needs.bytes_per_token, needs.largest(plan)),
        tokenizer=tokenizer,
        chat_format=chat_format,
        plan=lambda: replace(
            needs.plan(plan.device.free_bytes, found.name, measured=True), repacking=repacking
        ),
        prompt_style=found.prompt_style,
        notes=[*tokenizer.notes, *_notes(config, context)],
        on_close=file.close,
    )


class _Placing:
    """Counts the bytes that have moved into the kernels' layout; lets go of the file's pages behind."""

    def __init__(self, file: GGUFFile, weights: DecoderWeights, progress: Progress | None) -> None:
        self._file = file
        self._progress = progress
        self._total = sum(matrix.nbytes for matrix in weights.matrices())
        self._done = 0
        self.released = False

    def __call__(self, matrix: Matrix) -> None:
        self.released = self._file.release(matrix.name)
        self._done += matrix.nbytes
        if self._progress:
            self._progress(self._done, self._total)


@dataclass(frozen=True)
class _Needs:
    """What a model takes with these wishes."""

    specification: DecoderSpecification
    weights: DecoderWeights
    context: int
    kv: CacheType
    threads: int
    trained_context: int
    repack: bool

    @cached_property
    def _fixed(self) -> list[Item]:
        workspace = workspace_item(self.specification, self.weights, BATCH, self.threads, self.repack)
        return [*weight_items(self.weights, self.repack), workspace]

    @property
    def _fixed_bytes(self) -> int:
        """Bytes of main memory that are taken whatever the context."""
        return sum(item.nbytes for item in self._fixed if not item.mapped)

    @property
    def bytes_per_token(self) -> int:
        """Weight bytes that decoding one token reads."""
        return sum(item.bytes_per_token for item in self._fixed)

    def largest(self, plan: MemoryPlan) -> int:
        """The largest context that fits what was free."""
        free = plan.device.free_bytes - self._fixed_bytes
        return largest_context(self.specification, self.kv, free, self.trained_context)

    def plan(self, budget: int, name: str, measured: bool = False) -> MemoryPlan:
        """Place all of it in `budget` bytes of main memory; `measured`: with the time that reading takes."""
        rate = remembered_bandwidth(user_folder("cache"), self.threads) if measured else 0.0
        items = [*self._fixed, *cache_items(self.specification, self.context, self.kv)]
        try:
            return plan_memory(items, Device("cpu", budget, rate))
        except PlanError as error:
            free = budget - self._fixed_bytes
            largest = largest_context(self.specification, self.kv, free, self.trained_context)
            way_out = (
                f"with a context of {largest} it fits (--context, context=)"
                if largest
                else "take a smaller model or fewer bits a weight"
            )
            raise OutOfMemoryError(f"{name}: {error}; {way_out}") from error


def _budget(ram: int | None) -> int:
    """Bytes of main memory that may be used: what is free now, or less if the caller says so."""
    free = host_memory().free_bytes
    return free if ram is None else min(free, ram)


def _tokenizer(file: GGUFFile, config: ModelConfig, assumed: str | None) -> Tokenizer:
    """The file's tokenizer, which must have a token for every row of the embedding."""
    tokenizer = Tokenizer.from_metadata(file.metadata, assumed)
    if tokenizer.vocabulary_size != config.vocabulary_size:
        raise UnsupportedModelError(
            f"token_embd.weight: {config.vocabulary_size} rows, wanted one for each of the "
            f"{tokenizer.vocabulary_size} tokens"
        )
    return tokenizer


def _chat_format(file: GGUFFile, tokenizer: Tokenizer, given: str | None) -> ChatFormat | None:
    """The chat template of the file, or `given`; None where there is none."""
    metadata = dict(file.metadata)
    if given is not None:
        metadata["tokenizer.chat_template"] = given
    found = ChatFormat.from_metadata(metadata, tokenizer)
    return found if found.template_source is not None else None


def _notes(config: ModelConfig, context: int) -> list[str]:
    if context <= config.trained_context:
        return []
    return [
        f"the context of {context} is longer than the {config.trained_context} that the model was trained "
        "for; expect worse answers beyond"
    ]
