"""A LoRA adapter in memory: two matrices for each tensor of the model that it changes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import SettingError, shortened

Floats = npt.NDArray[np.float32]
EMBEDDING = "token_embd.weight"


@dataclass(frozen=True)
class AdapterTensor:
    """What an adapter adds to a tensor, b·a: a (…, rank, columns), b (…, rows, rank), float32; b includes
    alpha / rank. Tensors of experts have a first dimension of their number.
    """

    a: Floats
    b: Floats

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor that it changes."""
        return (*self.b.shape[:-1], self.a.shape[-1])


@dataclass(frozen=True)
class Adapter:
    """An adapter: its tensors by the GGUF names of those that they change. `digest`: of its contents."""

    path: Path
    tensors: Mapping[str, AdapterTensor]
    digest: str

    @property
    def name(self) -> str:
        """A short name for messages."""
        return shortened(self.path.name)

    @property
    def nbytes(self) -> int:
        return sum(each.a.nbytes + each.b.nbytes for each in self.tensors.values())


class AdapterError(SettingError):
    """An adapter that can't be read, or that belongs to another model."""


def adapter_error(path: Path, problem: str) -> AdapterError:
    return AdapterError(f"{shortened(str(path), 200)}: {problem}")


def checked_pair(path: Path, name: str, a: Floats, b: Floats) -> AdapterTensor:
    """The pair of a tensor; raises `AdapterError` if the shapes don't fit, or a value isn't finite."""
    tensor = shortened(name)
    if a.ndim not in (2, 3) or a.ndim != b.ndim or a.shape[:-2] != b.shape[:-2]:
        raise adapter_error(path, f"{tensor}: lora_a {a.shape} and lora_b {b.shape}, wanted two matrices")
    if a.shape[-2] != b.shape[-1]:
        raise adapter_error(
            path,
            f"{tensor}: lora_a {a.shape} has rank {a.shape[-2]}, lora_b {b.shape} has {b.shape[-1]}; "
            "wanted the same rank",
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise adapter_error(path, f"{tensor}: a value is NaN or infinite, wanted finite numbers")
    return AdapterTensor(np.ascontiguousarray(a), np.ascontiguousarray(b))
