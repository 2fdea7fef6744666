"""Encodes the matrices of a plan block by block of the decoder, by the Hessians of their inputs on a text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgeinfer.calibration.checkpoint import Checkpoint, file_key, partial_folder, run_key
from edgeinfer.calibration.hessians import InputCollector
from edgeinfer.calibration.reference_model import ReferenceModel, reference_model
from edgeinfer_kernels.decoder import BlockIndex
from edgeinfer_kernels.reference.backend import ReferenceBackend
from edgeinfer_kernels.reference.step import Array, Observer
from edgeinfer_quant_formats import GGUFFile, decode, encode
from edgeinfer_quant_formats.codecs.hessian_rounding import ROUNDED, encode_by_hessian
from edgeinfer_quant_formats.quantizer.quantizing import QuantizationPlan, TensorPlan
from edgeinfer_quant_formats.quantizer.substituted_file import SubstitutedFile
from edgeinfer_quant_formats.quantizer.tensor_roles import TOKEN_EMBEDDINGS

CALIBRATION_TOKENS = 8192
PIECE_ROWS = 4096
LABEL = "rounding by the Hessian"

Bytes = npt.NDArray[np.uint8]
Report = Callable[[str, int, int], None]


@dataclass
class _Window:
    """A window of the text between two blocks: hidden states, and a backend with its caches."""

    backend: ReferenceBackend
    x: Array
    layer_input: Array

    def run(self, index: BlockIndex, observer: Observer | None, *, keep: bool) -> None:
        """Run a block; unless `keep`, the hidden states and shared results stay those before it."""
        shared = {name: values.copy() for name, values in self.backend.shared.items()}
        x = self.x if keep else self.x.copy()
        if index.position == 0:
            self.layer_input = self.x.copy()
        self.backend.observer = observer
        self.backend.run_block(index, x, 0, self.layer_input)
        self.backend.observer = None
        if not keep:
            self.backend.shared.clear()
            self.backend.shared.update(shared)


@dataclass
class HessianQuantizer:
    """Encodes the tensors of `plan`, and stores each in `saved`, so that an interrupted run resumes.

    Each block reads what the encoded blocks before it compute. In memory are the hidden states and KV caches
    of the text, and the inputs and Hessians of one block.
    """

    model: ReferenceModel
    plan: QuantizationPlan
    saved: Checkpoint
    made: dict[str, Bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._planned = {
            tensor.info.name: tensor for tensor in self.plan.tensors
            if not tensor.is_copied and tensor.target.name in ROUNDED
        }  # fmt: skip

    def encode(self, texts: Sequence[Sequence[int]], report: Report | None) -> None:
        """Encode all tensors that the layers multiply, after the embeddings, which are only rounded."""
        for name in TOKEN_EMBEDDINGS:
            if name in self._planned:
                self.made[name] = self._kept(name)
        windows = [self._window(ids) for ids in texts]
        indices = list(self.model.spec.indices())
        for done, index in enumerate(indices):
            self._block(index, windows)
            if report:
                report(LABEL, done + 1, len(indices))

    def _window(self, ids: Sequence[int]) -> _Window:
        backend = self._current().backend()
        x = backend.embed(ids)
        backend.forward_layers(x, 0, ())
        return _Window(backend, x, x)

    def _block(self, index: BlockIndex, windows: Sequence[_Window]) -> None:
        """Encode the matrices of a block, and run it with them."""
        marker = f"block {index.layer} {index.position}"
        stored = self.saved.load(marker)
        if stored is not None:
            names = [str(name) for name in stored["names"]]
        else:
            names = self._encoded(index, windows)
            self.saved.store(marker, {"names": np.array(names, np.str_)})
        for name in names:
            found = self.saved.mapped(name)
            assert found is not None
            self.made[name] = found
        weights = self._current().weights
        for window in windows:
            window.backend.weights = weights
            window.run(index, None, keep=True)

    def _encoded(self, index: BlockIndex, windows: Sequence[_Window]) -> list[str]:
        """Encode and store the matrices of a block; their names."""
        collector = InputCollector(self._planned.keys())
        for window in windows:
            window.run(index, collector.seen, keep=False)
        names = sorted({name for name, _ in collector.inputs} - self.made.keys())
        for name in names:
            self.saved.store_mapped(name, self._by_hessian(name, collector))
        return names

    def _by_hessian(self, name: str, collector: InputCollector) -> Bytes:
        """A tensor's bytes; experts that the text doesn't use are rounded to the nearest."""
        tensor = self._planned[name]
        raw = self.model.file.raw(name)
        matrices = raw.reshape(int(np.prod(tensor.info.shape[:-2])), -1, raw.shape[-1])
        parts = []
        for expert, matrix in enumerate(matrices):
            weights = decode(np.ascontiguousarray(matrix), tensor.info.format)
            weights = weights.reshape(-1, tensor.info.shape[-1])
            inputs = collector.inputs.get((name, expert))
            if inputs is None or inputs.is_empty:
                parts.append(encode(weights, tensor.target))
            else:
                parts.append(encode_by_hessian(weights, tensor.target, inputs.hessian()).reshape(-1))
        return np.concatenate(parts)

    def _rounded(self, name: str) -> Bytes:
        """A tensor's bytes with each weight rounded to the nearest."""
        tensor, raw = self._planned[name], self.model.file.raw(name)
        importance = None if tensor.importance is None else tensor.importance[0]
        pieces = (raw[first : first + PIECE_ROWS] for first in range(0, len(raw), PIECE_ROWS))
        return np.concatenate(
            [encode(decode(np.ascontiguousarray(each), tensor.info.format), tensor.target, importance)
             for each in pieces]
        )  # fmt: skip

    def _kept(self, name: str) -> Bytes:
        """A tensor's rounded bytes, of an earlier run if it has stored them."""
        found = self.saved.mapped(name)
        if found is None:
            self.saved.store_mapped(name, self._rounded(name))
            found = self.saved.mapped(name)
        assert found is not None
        return found

    def _current(self) -> ReferenceModel:
        """The model with what is encoded already."""
        return self.model.with_file(self.file())

    def file(self) -> SubstitutedFile:
        """The source with the encoded tensors."""
        return SubstitutedFile(
            self.model.file,
            {
                name: (self._planned[name].target, partial(np.asarray, values))
                for name, values in self.made.items()
            },
        )


@dataclass(frozen=True)
class Calibrated:
    """The source with the encoded tensors, a plan that copies them, and what to remove when it is written."""

    file: SubstitutedFile
    plan: QuantizationPlan
    saved: Checkpoint


def calibrated(
    file: GGUFFile, plan: QuantizationPlan, target: Path, text: str, report: Report | None = None
) -> Calibrated:
    """Encode the matrices of a plan by their Hessians on the first 8,192 tokens of `text`.

    An interrupted run leaves `target`.partial, with which the next one resumes.

    Raises:
        SettingError: a text without a whole window, an encoder.
    """
    model = reference_model(file)
    texts = model.windows(text, CALIBRATION_TOKENS)
    formats = [(tensor.info.name, tensor.target.name) for tensor in plan.tensors]
    saved = Checkpoint(partial_folder(target), run_key("hessian", file_key(file), texts, formats))
    quantizer = HessianQuantizer(model, plan, saved)
    quantizer.encode(texts, report)
    view = quantizer.file()
    return Calibrated(view, _copying(plan, view, quantizer.made), saved)


def _copying(plan: QuantizationPlan, view: GGUFFile, made: Mapping[str, Bytes]) -> QuantizationPlan:
    """The plan with the encoded tensors as they are."""

    def planned(tensor: TensorPlan) -> TensorPlan:
        name = tensor.info.name
        return TensorPlan(view.tensors[name], tensor.target, tensor.requested) if name in made else tensor

    return replace(plan, tensors=tuple(planned(tensor) for tensor in plan.tensors))
