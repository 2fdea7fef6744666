"""Builds the kernels before their first use, so that the first run doesn't wait for the compiler."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.engine.protocols import Progress
from edgeinfer.errors import KernelError, UnsupportedModelError
from edgeinfer.hugging_face.opening import open_file
from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer.registry.registry import find_model
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.cpu.compiler.features import UnsupportedProcessorError, choose
from edgeinfer_kernels.cpu.compiler.kernel_cache import BLOCKS, KernelBuildError, KernelCache
from edgeinfer_kernels.cpu.compiler.kernel_units import every_unit, kernel_units
from edgeinfer_kernels.cpu.layout.packed_matrix import UnsupportedFormatError


@dataclass(frozen=True)
class WarmUpResult:
    """The result: `units` are available, `built` of them were compiled by this call."""

    instruction_set: str
    units: tuple[str, ...]
    built: int
    seconds: float
    folder: Path
    bytes: int
    """Size of all kernels in the folder."""


def warm_kernels(models: Sequence[str | Path] = (), progress: Progress | None = None) -> WarmUpResult:
    """Compile the kernels that these models need and that aren't cached; without models, those that any may
    need.

    `progress` is called with the number of built units, if any have to be built.

    Raises:
        UnknownModelError, FormatError, UnsupportedModelError: a model that doesn't exist or can't be run.
        KernelError: this machine can't build the kernels, or the cache can't be written.
        OSError: a file can't be opened.
    """
    needed = sorted(set().union(*map(_units, models))) if models else every_unit()
    units = [BLOCKS, *needed]
    begin = time.perf_counter()
    try:
        store = KernelCache(user_folder("cache"), choose())
        built = sum(store.find(unit) is None for unit in units)
        store.objects(units, progress)
        if store.warning:
            raise KernelError(store.warning)
    except (UnsupportedProcessorError, KernelBuildError) as error:
        raise KernelError(str(error)) from error
    nbytes = sum(file.stat().st_size for file in store.folder.glob("*.o"))
    seconds = time.perf_counter() - begin
    return WarmUpResult(store.isa.name, tuple(units), built, seconds, store.folder, nbytes)


def _units(model: str | Path) -> list[str]:
    """The kernel units that a model needs."""
    with open_file(find_model(model).path) as file:
        config = read_config(file)
        try:
            return kernel_units(read_weights(file, config))
        except UnsupportedFormatError as error:
            raise UnsupportedModelError(str(error)) from error
