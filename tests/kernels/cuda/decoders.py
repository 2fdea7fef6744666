"""Small random decoders, their reference logits, and the tested backend on the same tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from edgeinfer.model_config.weights import read_config, read_weights, rope_factors
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.device_parts import DeviceOptions, count_parts
from edgeinfer_kernels.cuda.tuning.step_shapes import Tuning
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.reference import ReferenceBackend
from edgeinfer_quant_formats import GGUFFile
from tests.kernels.cuda.conftest import HAS_GPU
from tests.random_models import RandomModel

CONTEXT = 64
SMALL = Tuning(splits=2, positions=16)
"""Few KV splits and small tiles, for the speed of the interpreter."""
STEP_TOKENS = 8
"""Most tokens that are read as a step, fewer than a backend allows: so short prompts have chunks."""
HEAD_ROWS = 72
"""Rows of a separate head where kernels are interpreted: some programs of sixteen rows, and a half."""
FLOATS_AGREE = 2.5e-3
"""Float weights: only the cache and the prompt's matmuls are float16."""
Logits = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Decoder:
    """A decoder with the arguments of backends; its file is open."""

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

    def shifted_logits(
        self, ids: Sequence[int], evicted: npt.NDArray[np.int64], more: Sequence[int], kind: CacheType
    ) -> Logits:
        """Logits of `more` after `ids` without the tokens at `gone`."""
        spec = self.specification
        state = DecoderState.allocate(spec, CONTEXT, kind)
        backend = ReferenceBackend(spec, self.weights, state, np.float64)
        backend.forward(backend.embed(ids), 0)
        backend.evict(evicted, len(ids))
        x = backend.embed(more)
        backend.forward(x, len(ids) - len(evicted))
        return np.asarray(backend.logits(x), np.float64)

    def backend(
        self, device: str, tuning: Tuning | None = None, context: int = CONTEXT, **options: Any
    ) -> CudaBackend:
        """On a GPU as it is used; interpreted, with small tiles. Prompts of more than STEP_TOKENS tokens are
        read in chunks.
        """
        return CudaBackend(
            self.specification,
            self.weights,
            context,
            torch.device(device),
            DeviceOptions(**{"chunk": 16, "step_tokens": STEP_TOKENS} | options),
            tuning=tuning or (Tuning() if device == "cuda" else SMALL),
        )

    def counted_bytes(self, device: str, **options: Any) -> int:
        """The predicted bytes of the backend."""
        parts = count_parts(
            self.specification,
            self.weights,
            CONTEXT,
            torch.device(device),
            DeviceOptions(**{"chunk": 16} | options),
        )
        return sum(part.nbytes for part in parts)


def sample_greedy(backend: CudaBackend, token_id: int, start: int, room: bool) -> int:
    """The id of the highest logit after a token, sampled on the device."""
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
            bias = None if weights.output_bias is None else weights.output_bias[:HEAD_ROWS]
            weights = replace(weights, output=weights.output.take_rows(0, HEAD_ROWS), output_bias=bias)
        yield Decoder(specification, weights)


def read(
    backend: CudaBackend, ids: Sequence[int], counts: Sequence[int], expected: int = 2, start: int = 0
) -> dict[int, Logits]:
    """Take `counts` tokens at a time, to positions start…; place among `ids` -> logits of the last `wanted`
    of each time.
    """
    result: dict[int, Logits] = {}
    at = 0
    for count in counts:
        x = backend.embed(ids[at : at + count])
        backend.forward(x, start + at)
        first = max(count - expected, 0)
        logits = backend.logits(x[first:]).astype(np.float64)
        result |= {at + first + row: logits[row] for row in range(count - first)}
        at += count
    return result


def distances(result: dict[int, Logits], expected: Logits) -> list[float]:
    """The distance of every row from the expected one, over the length of that one."""
    return [
        float(np.linalg.norm(row - expected[at]) / np.linalg.norm(expected[at])) for at, row in result.items()
    ]


def worst(result: dict[int, Logits], expected: Logits) -> float:
    """The largest of the distances."""
    return max(distances(result, expected))
