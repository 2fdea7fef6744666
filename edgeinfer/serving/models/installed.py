"""The models on this disk as a server's models: found by name, planned together with others, loaded."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import edgeinfer
from edgeinfer.errors import OutOfMemoryError
from edgeinfer.model import Model
from edgeinfer.options.device_budgets import parse_budgets
from edgeinfer.planning.model_plan import plan_model
from edgeinfer.registry.model_file import ModelFile
from edgeinfer.registry.registry import find_model, list_models

SECONDS_PER_LISTING = 5.0
"""For so long the list of a scan of the model folders is used again."""
BUDGETS = {"vram": "gpu", "ram": "cpu"}
"""The load option with the memory budget -> the device."""


class ModelSource(Protocol):
    """Where a pool finds its models, and how it loads them."""

    def files(self, refresh: bool = False) -> Mapping[str, ModelFile]:
        """The models by name; `refresh`: scan the disk now."""
        ...

    def fits_with(self, file: ModelFile, loaded: Collection[Model]) -> bool:
        """Whether the model runs as fast with the loaded ones in memory as without them. Slow.

        Raises:
            EdgeInferError: it can't be loaded at all.
        """
        ...

    def load(self, file: ModelFile, loaded: Collection[Model]) -> Model:
        """Load a model with the memory that the loaded ones leave. Slow. Raises as `edgeinfer.load`."""
        ...


class InstalledModels:
    """All models on this disk, and `given`: names or paths of models that are served in any case.

    `options`: keywords of `edgeinfer.load` for each of them; `note`: called with lines for the user.
    """

    def __init__(self, given: Sequence[str], options: Mapping[str, Any], note: Callable[[str], None]) -> None:
        self._given = {file.name: (name, file) for name in given for file in (find_model(name),)}
        self._options = dict(options)
        for budget in BUDGETS:
            self._options[budget] = parse_budgets(budget, options.get(budget))
        self._note = note
        self._files: dict[str, ModelFile] = {}
        self._scanned = -SECONDS_PER_LISTING

    @property
    def given(self) -> list[str]:
        """The names of the given models."""
        return list(self._given)

    def files(self, refresh: bool = False) -> Mapping[str, ModelFile]:
        if refresh or time.monotonic() - self._scanned >= SECONDS_PER_LISTING:
            files = {name: file for name, (_, file) in self._given.items()}
            for file in list_models():
                files.setdefault(file.name, file)
            self._files, self._scanned = files, time.monotonic()
        return self._files

    def fits_with(self, file: ModelFile, loaded: Collection[Model]) -> bool:
        try:
            plan = plan_model(file.path, **self._budgets(loaded)).plan
        except OutOfMemoryError:
            return False
        return plan.file_bytes == 0 and plan.device in ("cpu", "gpu") and self._keeps_gpu(plan.device, loaded)

    def _keeps_gpu(self, device: str, loaded: Collection[Model]) -> bool:
        """Whether the model isn't on the CPU only because the loaded ones fill the GPU."""
        return device == "gpu" or all(model.gpu is None for model in loaded)

    def load(self, file: ModelFile, loaded: Collection[Model]) -> Model:
        self._note(f"loading {file.name}")
        name = self._given[file.name][0] if file.name in self._given else file.name
        model: Model = edgeinfer.load(name, **self._budgets(loaded))
        for line in model.warnings:
            self._note(line)
        return model

    def _budgets(self, loaded: Collection[Model]) -> dict[str, Any]:
        """The load options, with budgets less what the loaded models use; without a budget, what is free now
        counts, of which their memory is no part.
        """
        options = dict(self._options)
        for budget, device in BUDGETS.items():
            if isinstance(options[budget], int):
                used = sum(model.plan.bytes_on(device) for model in loaded if model.plan is not None)
                options[budget] = max(options[budget] - used, 1)
        return options
