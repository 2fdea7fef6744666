"""Runs of a model over a few windows that start at any layer, to measure what other weights change."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from edgeinfer.calibration.reference_model import ReferenceModel
from edgeinfer.evaluation.scores import score
from edgeinfer_kernels.reference.backend import ReferenceBackend
from edgeinfer_kernels.reference.step import Array, Observer

EMBEDDING = -1
"""The layer of what is read before the first one."""


@dataclass(frozen=True)
class _LayerInput:
    """The hidden states before a layer, and the results of earlier layers that later ones read."""

    x: Array
    shared: dict[str, Array]

    @classmethod
    def of(cls, backend: ReferenceBackend, x: Array) -> Self:
        return cls(x.copy(), {name: values.copy() for name, values in backend.shared.items()})

    def restored(self, backend: ReferenceBackend) -> Array:
        """The hidden states; the backend gets the earlier results."""
        backend.shared.clear()
        backend.shared.update({name: values.copy() for name, values in self.shared.items()})
        return self.x.copy()


class LayerRuns:
    """The hidden states of each window before each layer, and its logits: those of the original weights.

    Caches and states of a window are those of its last run. So measure the last layers first: a run from a
    layer on reads what the original weights wrote in the layers before.
    """

    def __init__(
        self, model: ReferenceModel, windows: Sequence[Sequence[int]], observer: Observer | None = None
    ) -> None:
        self.layers = len(model.spec.layers)
        self._windows = windows
        self._backends = [model.backend() for _ in windows]
        self._inputs: list[list[_LayerInput]] = []
        self._logits: list[npt.NDArray[np.float32]] = []
        for backend, ids in zip(self._backends, windows, strict=True):
            backend.observer = observer
            x, inputs = backend.embed(ids), []
            for layer in range(self.layers):
                inputs.append(_LayerInput.of(backend, x))
                backend.forward_layers(x, 0, [layer])
            backend.observer = None
            self._inputs.append([*inputs, _LayerInput.of(backend, x)])
            self._logits.append(backend.logits(x))

    def divergence(self, model: ReferenceModel, layer: int) -> float:
        """The mean KL divergence in nats of the outputs from those of the original weights, with the weights
        of `model`, which differ from `layer` on; `EMBEDDING`: everywhere, `layers`: in the head only.
        """
        parts = []
        for index, (backend, ids) in enumerate(zip(self._backends, self._windows, strict=True)):
            backend.weights = model.weights
            logits = self._run(backend, index, layer, ids)
            parts.append(score(logits, [0] * len(ids), self._logits[index]).divergence)
        return float(np.concatenate(parts).mean())

    def _run(self, backend: ReferenceBackend, index: int, layer: int, ids: Sequence[int]) -> Array:
        x = backend.embed(ids) if layer == EMBEDDING else self._inputs[index][layer].restored(backend)
        backend.forward_layers(x, 0, range(max(layer, 0), self.layers))
        return backend.logits(x)
