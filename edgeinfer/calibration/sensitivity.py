"""Measures how much the outputs of a model change if the tensors of one group are quantized, per format."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from edgeinfer.calibration.checkpoint import Checkpoint
from edgeinfer.calibration.importance import InputRecorder
from edgeinfer.calibration.layer_runs import LayerRuns
from edgeinfer.calibration.reference_model import ReferenceModel
from edgeinfer_quant_formats import FormatSpec, GGUFFile, block_format, decode, encode
from edgeinfer_quant_formats.gguf.tensor_index import TensorInfo
from edgeinfer_quant_formats.quantizer.substituted_file import SubstitutedFile
from edgeinfer_quant_formats.quantizer.tensor_roles import OUTPUT, is_quantized, layer_of
from edgeinfer_quant_formats.quantizer.type_selection import fitting_format

CANDIDATES = ("Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
"""The formats that a tensor may get, besides its own."""
MEASURED = ("Q2_K", "Q4_K")
"""The formats whose divergence is measured; that of the others follows from their errors."""
SAMPLED_WEIGHTS = 1 << 20
"""Weights of a tensor on which the error of a format is measured."""
EXPONENTS = (0.5, 2.0)
LIKE = ((re.compile(r"attn_[qk](?=\.)"), "attn_qk"), (re.compile(r"ffn_(gate|up)(?=[._])"), "ffn_gate_up"))
"""Tensors of a layer that are measured together."""

Importances = Mapping[str, npt.NDArray[np.float32]]
"""Tensor name -> (matrices, columns)."""
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one layer that get the same format."""

    name: str
    layer: int
    tensors: tuple[TensorInfo, ...]

    def formats(self) -> list[FormatSpec]:
        """The formats that the group can have, the one with the fewest bits first, its own last."""
        columns, own = self.tensors[0].shape[-1], self.tensors[0].format
        found = {spec.name: spec for spec in (fitting_format(block_format(n), columns) for n in CANDIDATES)}
        smaller = sorted(
            (spec for spec in found.values() if bits(spec) < bits(own) and spec.block_elements > 1), key=bits
        )
        return [*smaller, own]


@dataclass(frozen=True)
class Sensitivity:
    """The divergence in nats that each of its formats causes when only this group has it."""

    group: TensorGroup
    divergences: Mapping[str, float]


def bits(spec: FormatSpec) -> float:
    """Bits per weight."""
    return 8 * spec.block_bytes / spec.block_elements


def tensor_groups(file: GGUFFile, architecture: str, layers: int) -> list[TensorGroup]:
    """The groups of all tensors of the decoder that are quantized, in file order."""
    found: dict[str, list[TensorInfo]] = {}
    for name, info in file.tensors.items():
        if is_quantized(name, info.shape, architecture) and layer_of(name) < layers:
            key = name
            for pattern, like in LIKE:
                key = pattern.sub(like, key)
            found.setdefault(f"{key} {info.shape[-1]} {info.format.name}", []).append(info)
    return [
        TensorGroup(key, layers if tensors[0].name == OUTPUT else layer_of(tensors[0].name), tuple(tensors))
        for key, tensors in found.items()
    ]


def measure_sensitivities(
    model: ReferenceModel,
    windows: Sequence[Sequence[int]],
    saved: Checkpoint,
    importances: Importances,
    report: Report | None = None,
) -> list[Sensitivity]:
    """The sensitivity of each group; results in `saved` aren't measured again. `importances`: those with
    which the weights will be encoded.
    """
    groups = tensor_groups(model.file, model.config.architecture, len(model.spec.layers))
    todo = [group for group in groups if saved.load(group.name) is None]
    if todo:
        recorder = InputRecorder(model.file)
        runs = LayerRuns(model, windows, recorder.seen)
        columns = {name: sums.squares.astype(np.float32) for name, sums in recorder.sums.items()}
        # A run from a layer on changes the caches of the layers after it, so the last layers come first.
        todo.sort(key=lambda group: -group.layer)
        for done, group in enumerate(todo):
            found = _measured(model, runs, group, importances, columns)
            saved.store(group.name, {name: np.array(value) for name, value in found.items()})
            if report:
                report("measuring sensitivities", len(groups) - len(todo) + done + 1, len(groups))
    return [Sensitivity(group, _loaded(saved, group)) for group in groups]


def _loaded(saved: Checkpoint, group: TensorGroup) -> dict[str, float]:
    arrays = saved.load(group.name)
    assert arrays is not None
    return {name: float(value) for name, value in arrays.items()}


def _measured(
    model: ReferenceModel, runs: LayerRuns, group: TensorGroup, importances: Importances, columns: Importances
) -> dict[str, float]:
    """The divergence of each format: measured for two, the others from their errors."""
    formats = group.formats()
    quantized = formats[:-1]
    own = formats[-1].name
    if not quantized:
        return {own: 0.0}
    width = group.tensors[0].shape[-1]
    measured = {fitting_format(block_format(name), width).name for name in MEASURED}
    anchors = [spec for spec in quantized if spec.name in measured] or quantized[:1]
    errors = {spec.name: _error(model.file, group, spec, importances, columns) for spec in quantized}
    known = {
        spec.name: runs.divergence(_quantized(model, group, spec, importances), group.layer)
        for spec in anchors
    }
    return {spec.name: _interpolated(errors, known, spec.name) for spec in quantized} | {own: 0.0}


def _quantized(
    model: ReferenceModel, group: TensorGroup, spec: FormatSpec, importances: Importances
) -> ReferenceModel:
    """The model with the tensors of the group in another format."""
    made = {}
    for info in group.tensors:
        parts = [encode(rows, spec, weight) for rows, weight in _matrices(model.file, info, importances)]
        made[info.name] = (spec, partial(np.concatenate, parts))
    return model.with_file(SubstitutedFile(model.file, made))


def _matrices(
    file: GGUFFile, info: TensorInfo, importances: Importances, limit: int | None = None
) -> Iterator[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None]]:
    """The rows of each matrix of a tensor and the importance of its columns; about `limit` weights."""
    raw = file.raw(info.name)
    weights = importances.get(info.name)
    matrices = 1 if weights is None else len(weights)
    raw = raw.reshape(matrices, -1, raw.shape[-1])
    step = 1 if limit is None else -(-int(np.prod(info.shape)) // limit)
    for index in range(matrices):
        rows = np.ascontiguousarray(raw[index, ::step])
        values = decode(rows, info.format).reshape(-1, info.shape[-1])
        yield values, None if weights is None else weights[index]


def _error(
    file: GGUFFile, group: TensorGroup, spec: FormatSpec, importances: Importances, columns: Importances
) -> float:
    """The mean squared error of the group's outputs, up to a factor that is equal for all formats."""
    total = 0.0
    for info in group.tensors:
        inputs = columns.get(info.name)
        inputs = np.ones((1, info.shape[-1]), np.float32) if inputs is None else inputs
        for rows, weight in _matrices(file, info, importances, SAMPLED_WEIGHTS):
            squares = (decode(encode(rows, spec, weight), spec).reshape(rows.shape) - rows) ** 2
            total += float(squares.sum(axis=0) @ inputs.sum(axis=0))
    return total


def _interpolated(errors: Mapping[str, float], known: Mapping[str, float], name: str) -> float:
    """The divergence of a format between those measured, as a power of its error; beyond the one with the
    smaller error it is proportional to the squared error, as a small change of the outputs is.
    """
    if name in known:
        return max(known[name], 0.0)
    coarse, fine = max(known, key=errors.__getitem__), min(known, key=errors.__getitem__)
    if not errors[fine] or known[fine] <= 0:
        return 0.0
    ratio, exponent = errors[name] / errors[fine], 1.0
    if ratio > 1 and errors[coarse] > errors[fine] and known[coarse] > 0:
        exponent = np.log(known[coarse] / known[fine]) / np.log(errors[coarse] / errors[fine])
    return float(known[fine] * ratio ** np.clip(exponent, *EXPONENTS))
