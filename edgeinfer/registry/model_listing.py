"""Data of a listed model: quantization, and whether it fits this machine."""

from dataclasses import dataclass

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.support import ModelSupport, model_support, unsupported_type
from edgeinfer.planning.fit import Fit, fit, with_known_speeds
from edgeinfer.planning.model_plan import sizes_of, usual_context
from edgeinfer.registry.model_file import ModelFile, quant_of
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_quant_formats import GGUFFile
from edgeinfer_quant_formats.errors import FormatError, UnsupportedTypeError


@dataclass(frozen=True)
class ListedModel:
    """A model with the data of its file's header. `fit` None: unknown; `support` None: the header can't be
    read.
    """

    model: ModelFile
    quant: str
    fit: Fit | None
    support: ModelSupport | None = None
    sizes: ModelSizes | None = None


def listed(model: ModelFile, machine: Machine) -> ListedModel:
    """Read a model file's header up to its tensor table; an unreadable one is listed without its data."""
    quant = quant_of(model.path.name)
    support = None
    try:
        with GGUFFile.open(model.path) as file:
            support = model_support(file)
            sizes, context = sizes_of(file), usual_context(file)
    except UnsupportedTypeError as error:
        return ListedModel(model, quant, None, unsupported_type(error, model.path))
    except (FormatError, UnsupportedModelError, OSError):
        return ListedModel(model, quant, None, support)
    if not quant:
        by_format: dict[str, int] = {}
        for matrix in sizes.matrices():
            by_format[matrix.format] = by_format.get(matrix.format, 0) + matrix.nbytes
        quant = max(by_format, key=lambda name: by_format[name])
    model_fit = fit(sizes, with_known_speeds(machine, sizes), context)
    return ListedModel(model, quant, model_fit, support, sizes)
