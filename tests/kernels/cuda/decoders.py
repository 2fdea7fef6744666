"""Small random decoders, what the reference makes of them, and the tested backend on the same tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from edgeinfer.model_config.weights import read_config, read_weights, rope_factors
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.device_parts import DeviceOptions, count_parts
from edgeinfer_kernels.cuda.tuning.step_shapes import Tuning
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.layer_cache import CacheType
from edgeinfer_kernels.reference import ReferenceBackend
from edgeinfer_quant_formats import GGUFFile
from tests.kernels.cuda.conftest import HAS_GPU
from tests.random_models import RandomModel

CONTEXT = 64
SMALL = Tuning(splits=2, positions=16)
"""Few stretches and small tiles: what an interpreter has patience for."""
HEAD_ROWS = 72
"""Of a head of its own where kernels are interpreted: some programs of sixteen rows, and a half."""
FLOATS_AGREE = 2.5e-3
"""Float weights: only the cache and the prompt's products are float16."""
Logits = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Decoder:
    """A decoder as backends are given it; its file is open."""

    specification: DecoderSpec
    weights: DecoderWeights

    def ids(self, count: int) -> list[int]:
        """Random tokens, always the same."""
        random = np.random.default_rng(5)
        return [int(i) for i in random.integers(0, self.weights.token_embd.rows, count)]

    def reference_logits(self, ids: Sequence[int], kind: CacheType = "f32") -> Logits:
        """(tokens, vocabulary) in float64, with a cache of that type."""
        state = DecoderState.allocate(self.specification, CONTEXT, kind)
        backend = ReferenceBackend(self.specification, self.weights, state, np.float64)
        x = backend.embed(ids)
        backend.forward(x, 0)
        return np.asarray(backend.logits(x), np.float64)

    def slid_logits(
        self, ids: Sequence[int], gone: npt.NDArray[np.int64], more: Sequence[int], kind: CacheType
    ) -> Logits:
        """Of `more` behind what is left of `ids` without the tokens at `gone`."""
        facts = self.specification
        state = DecoderState.allocate(facts, CONTEXT, kind)
        backend = ReferenceBackend(facts, self.weights, state, np.float64)
        backend.forward(backend.embed(ids), 0)
        backend.evict(gone, len(ids))
        x = backend.embed(more)
        backend.forward(x, len(ids) - len(gone))
        return np.asarray(backend.logits(x), np.float64)

    def backend(self, device: str, tuning: Tuning | None = None, **options: Any) -> CudaBackend:
        """On a GPU as it is used; interpreted, with small tiles."""
        return CudaBackend(
            self.specification,
            self.weights,
            CONTEXT,
            torch.device(device),
            DeviceOptions(**{"chunk": 16} | options),
            tuning=tuning or (Tuning() if device == "cuda" else SMALL),
        )

    def counted_bytes(self, device: str, **options: Any) -> int:
        """What the backend says that it will take."""
        parts = count_parts(
            self.specification,
            self.weights,
            CONTEXT,
            torch.device(device),
            DeviceOptions(**{"chunk": 16} | options),
        )
        return sum(part.nbytes for part in parts)


def choose_best(backend: CudaBackend, token_id: int, start: int, room: bool) -> int:
    """The id of the highest logit behind a token, chosen on the device."""
    return backend.sample_next(token_id, start, may_run_ahead=room)


@contextmanager
def opened(model: RandomModel, folder: Path, layers: tuple[int, ...] = ()) -> Iterator[Decoder]:
    """The decoder of the model's file, with these of its layers alone where some are named; interpreted, with
    a part of its head.
    """
    path = model.write(folder / "model.gguf")
    with GGUFFile.open(path) as file:
        config = read_config(file)
        specification = config.specification(rope_factors(file, config, CONTEXT))
        weights = read_weights(file, config)
        if layers:
            specification = replace(specification, layers=tuple(specification.layers[i] for i in layers))
            weights = replace(weights, layers=tuple(weights.layers[i] for i in layers))
        if not HAS_GPU and not model.tied:
            specification = replace(specification, vocabulary_size=HEAD_ROWS)
            weights = replace(weights, output=weights.output.take_rows(0, HEAD_ROWS))
        yield Decoder(specification, weights)


def read(
    backend: CudaBackend, ids: Sequence[int], counts: Sequence[int], wanted: int = 2, start: int = 0
) -> dict[int, Logits]:
    """Take `counts` tokens at a time, to positions start…; place among `ids` -> logits of the last `wanted`
    of each time.
    """
    found: dict[int, Logits] = {}
    at = 0
    for count in counts:
        x = backend.embed(ids[at : at + count])
        backend.forward(x, start + at)
        first = max(count - wanted, 0)
        logits = backend.logits(x[first:]).astype(np.float64)
        found |= {at + first + row: logits[row] for row in range(count - first)}
        at += count
    return found


def distances(found: dict[int, Logits], want: Logits) -> list[float]:
    """How far every row that was found is from the wanted one, over that one's length."""
    return [float(np.linalg.norm(row - want[at]) / np.linalg.norm(want[at])) for at, row in found.items()]


def worst(found: dict[int, Logits], want: Logits) -> float:
    """The largest of the distances."""
    return max(distances(found, want))
