"""The model registry as a list: which models run on a machine, how fast, and the most useful first."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.loading.model_source import DEFAULT_CONTEXT
from edgeinfer.options.option_field import Progress
from edgeinfer.planning.absent_model import entry_header
from edgeinfer.planning.fit import Fit, fit, with_known_speeds
from edgeinfer.planning.model_plan import sizes_of
from edgeinfer.registry.entries import RegistryEntry
from edgeinfer.registry.model_file import ModelFile, quant_of
from edgeinfer.registry.model_listing import listed
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_quant_formats.errors import FormatError

FAST_ENOUGH = 15.0
"""Minimum tokens per second of a model that runs well: about twice the speed of reading."""
Computed = dict[tuple[str, str, int], "tuple[int, Fit, bool] | None"]
"""Shape, quantization and context -> bytes, fit, and whether it is an encoder; None: an unknown shape."""
SCALES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True)
class ListedEntry:
    """An entry of the registry with a quantization. None: unknown.

    `is_computed`: its bytes follow from the shape, they aren't published. `here`: the file on this disk.
    """

    entry: RegistryEntry
    quant: str
    size_bytes: int | None
    is_computed: bool
    fit: Fit | None
    is_encoder: bool | None = None
    here: ModelFile | None = None

    @property
    def reads_only(self) -> bool:
        """Whether it reads texts and completes none."""
        return self.entry.kind != "text" or bool(self.is_encoder)

    @property
    def tier(self) -> int:
        """0: runs well; 1: runs slowly; 2: for embeddings or scores; 3: unknown; 4: doesn't fit."""
        if self.fit is None:
            return 3
        if not self.fit.fits:
            return 4
        if self.reads_only:
            return 2
        speed = self.speed
        return int(speed is not None and speed < FAST_ENOUGH)

    @property
    def speed(self) -> float | None:
        """Decoded tokens per second; of a model that reads only, those of texts."""
        if self.fit is None:
            return None
        return self.fit.prefill_tokens_per_second if self.reads_only else self.fit.tokens_per_second

    @property
    def order(self) -> tuple[int, str, float]:
        """Sorts the most useful first: by tier, then the newest, then the largest."""
        newest = "".join(chr(ord("9") - int(digit)) for digit in self.entry.released if digit.isdigit())
        return self.tier, newest or "~", -parameter_count(self.entry.parameters)


def parameter_count(text: str) -> float:
    """The total number of parameters in a text as "30.5B, 3.3B active"; 0: unknown."""
    match = re.match(r"(\d+(?:\.\d+)?)([KMBT])", text)
    return float(match[1]) * SCALES[match[2]] if match else 0.0


def listed_registry(
    entries: Mapping[str, RegistryEntry],
    here: Sequence[ModelFile],
    machine: Machine,
    progress: Progress | None = None,
) -> list[ListedEntry]:
    """All entries, the most useful on this machine first; `here`: the models on this disk. `progress`: called
    with the number of entries that are planned, and of all.
    """
    files: dict[str, ModelFile] = {}
    for model in here:
        files.setdefault(model.name.partition(":")[0], model)
    known: Computed = {}
    result = []
    for entry in entries.values():
        file = files.get(entry.name)
        result.append(_on_disk(entry, file, machine) if file else _absent(entry, machine, known))
        if progress:
            progress(len(result), len(entries))
    return sorted(result, key=lambda one: one.order)


def _on_disk(entry: RegistryEntry, file: ModelFile, machine: Machine) -> ListedEntry:
    model = listed(file, machine)
    is_encoder = model.sizes.is_encoder if model.sizes else None
    return ListedEntry(
        entry, model.quant or quant_of(file.path.name), file.size_bytes, False, model.fit, is_encoder, file
    )


def _absent(entry: RegistryEntry, machine: Machine, known: Computed) -> ListedEntry:
    """An entry without a file; `known`: results by shape, quantization and context."""
    quant = entry.usual_quant
    published = entry.size_bytes.get(quant)
    context = min(entry.context or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    key = (entry.shape, quant, context)
    if key not in known:
        known[key] = _computed(entry, quant, context, machine)
    computed = known[key]
    if computed is None:
        return ListedEntry(entry, quant, published, False, None)
    nbytes, entry_fit, is_encoder = computed
    return ListedEntry(entry, quant, published or nbytes, published is None, entry_fit, is_encoder)


def _computed(
    entry: RegistryEntry, quant: str, context: int, machine: Machine
) -> tuple[int, Fit, bool] | None:
    """Bytes, fit and kind of a model by its shape; None: the shape isn't known."""
    try:
        header = entry_header(entry, quant)
        if header is None:
            return None
        sizes = sizes_of(header)
    except (FormatError, UnsupportedModelError):
        return None
    return header.nbytes, fit(sizes, with_known_speeds(machine, sizes), context), sizes.is_encoder
