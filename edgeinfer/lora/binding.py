"""Finds the matrices of a loaded model that its adapters change."""

from collections.abc import Iterator, Sequence

import numpy as np

from edgeinfer.errors import shortened
from edgeinfer.lora.adapter import EMBEDDING, Adapter, AdapterTensor, adapter_error
from edgeinfer_kernels.decoder import DecoderWeights
from edgeinfer_kernels.lora.sizes import LoraSizes
from edgeinfer_kernels.lora.weights import LoraWeights, ModelLora, joined
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_quant_formats import GGUFFile

Scaled = tuple[Adapter, float]


def bound_lora(file: GGUFFile, weights: DecoderWeights, adapters: Sequence[Scaled]) -> ModelLora:
    """The adapters, each times its scale, by the matrices of the model.

    Raises:
        AdapterError: the model has no such tensor, in this shape, or doesn't multiply it as in the file.
    """
    used = [(adapter, scale) for adapter, scale in adapters if scale]
    for adapter, _ in used:
        for name, tensor in adapter.tensors.items():
            _check(file, adapter, name, tensor)
    matrices: dict[int, LoraWeights] = {}
    found: set[str] = set()
    for matrix in weights.matrices():
        if matrix is weights.token_embd:
            continue
        pairs = [_of_matrix(file, matrix, each, scale) for each, scale in used if matrix.name in each.tensors]
        if pairs:
            matrices[id(matrix)] = joined(pairs)
            found.add(matrix.name)
    embeddings = [
        LoraWeights(EMBEDDING, pair.a[None], pair.b[None] * np.float32(scale))
        for each, scale in used
        if (pair := each.tensors.get(EMBEDDING)) is not None
    ]
    for adapter, _ in used:
        if left := adapter.tensors.keys() - found - {EMBEDDING}:
            raise adapter_error(
                adapter.path,
                f"{shortened(min(left))}: the model multiplies no such matrix, wanted one it does",
            )
    return ModelLora(matrices, joined(embeddings) if embeddings else None)


def lora_sizes(adapters: Sequence[Scaled]) -> LoraSizes | None:
    """The sizes of the adapters together, as `bound_lora` joins them; None: there is none."""
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for adapter, scale in adapters:
        for name, tensor in adapter.tensors.items() if scale else ():
            rank = tensor.a.shape[-2] + (shapes[name][0][-2] if name in shapes else 0)
            a, b = tensor.a.shape, tensor.b.shape
            shapes[name] = (*a[:-2], rank, a[-1]), (*b[:-1], rank)
    return LoraSizes.of(shapes) if shapes else None


def _check(file: GGUFFile, adapter: Adapter, name: str, tensor: AdapterTensor) -> None:
    info = file.tensors.get(name)
    if info is None:
        raise adapter_error(
            adapter.path, f"{shortened(name)}: the model has no such tensor; take an adapter of this model"
        )
    if info.shape != tensor.shape:
        raise adapter_error(
            adapter.path,
            f"{shortened(name)}: it is for shape {tensor.shape}, the model has {info.shape}; take an adapter "
            "of this model",
        )


def _of_matrix(file: GGUFFile, matrix: Matrix, adapter: Adapter, scale: float) -> LoraWeights:
    """What the adapter adds to a matrix, which may have some of the tensor's rows only."""
    tensor = adapter.tensors[matrix.name]
    rank, columns = tensor.a.shape[-2:]
    a, b = tensor.a.reshape(-1, rank, columns), tensor.b.reshape(-1, rank) * np.float32(scale)
    try:
        rows = np.concatenate([np.arange(first, first + matrix.rows) for first in _first_rows(file, matrix)])
    except LookupError:
        raise adapter_error(
            adapter.path,
            f"{shortened(matrix.name)}: the model uses it in another form, which takes no adapter",
        ) from None
    return LoraWeights(matrix.name, a, b[rows].reshape(len(a), matrix.rows, rank))


def _first_rows(file: GGUFFile, matrix: Matrix) -> Iterator[int]:
    """The row of the tensor, of all experts together, at which the matrix begins, or each of its experts.
    Raises `LookupError`: the matrix isn't a view of the tensor.
    """
    raw = file.raw(matrix.name)
    flat = raw.reshape(-1, raw.shape[-1])
    offset = matrix.raw.ctypes.data - flat.ctypes.data
    experts = raw.shape[0] if raw.ndim == 3 else 1
    is_view = (
        0 <= offset < flat.nbytes and matrix.raw.shape[1] == flat.shape[1] and not offset % flat.shape[1]
    )
    if not is_view or matrix.experts != experts:
        raise LookupError(matrix.name)
    first = offset // flat.shape[1]
    for index in range(experts):
        yield first + (matrix.picked[index] if matrix.picked else index) * matrix.rows
