"""Recurrent states on a GPU: rejected drafts, rewinds and snapshots equal evaluating the tokens again."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer_kernels.blocks.rwkv7_time_mix import Rwkv7TimeMixWeights
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.decoder import LayerWeights
from tests.kernels.cuda.decoders import FLOATS_AGREE, Decoder, opened, read, worst
from tests.model_zoo import ZOO

KINDS = {
    "lfm2": (1, 2),
    "qwen35": (0, 3),
    "mamba2-groups": (0, 1),
    "falcon-h1": (0, 1),
    "mamba": (0, 1),
    "rwkv7": (0, 1),
}
"""The layers of each: some with a state, and attention where there is any."""
TOLERANCE = 3 * FLOATS_AGREE


def check(
    decoder: Decoder, backend: CudaBackend, ids: list[int], start: int, counts: tuple[int, ...]
) -> None:
    """ids[start:] in steps and chunks of these lengths after the state of ids[:start]."""
    expected = decoder.reference_logits(ids[: start + sum(counts)])[start:]
    result = read(backend, ids[start:], counts, expected=1, start=start)
    assert worst(result, expected) < TOLERANCE


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_rewound_positions_are_processed_again(device: str, tmp_path: Path, kind: str) -> None:
    with opened(ZOO[kind], tmp_path, KINDS[kind]) as decoder:
        ids = decoder.ids(40)
        wrong = list(reversed(ids))
        backend = decoder.backend(device)
        read(backend, ids[:11], (11,), expected=1)
        # Of a draft of five tokens two are accepted, and of the next three one; then a chunk follows.
        read(backend, [*ids[11:13], *wrong[:3]], (5,), expected=1, start=11)
        assert backend.rewind(13) == 13
        check(decoder, backend, ids, 13, (1,))
        read(backend, [ids[14], *wrong[:2]], (3,), expected=1, start=14)
        assert backend.rewind(15) == 15
        check(decoder, backend, ids, 15, (12, 1))
        backend.close()


@pytest.mark.slow
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_prompt_after_a_rewind_equals_the_reference(device: str, tmp_path: Path, kind: str) -> None:
    """More positions, with pending ones before them, than the recurrence evaluates together."""
    with opened(ZOO[kind], tmp_path, KINDS[kind]) as decoder:
        ids = decoder.ids(50)
        backend = decoder.backend(device, chunk=40)
        read(backend, [*ids[:7], *reversed(ids[:4])], (5, 6), expected=1)
        assert backend.rewind(7) == 7
        check(decoder, backend, ids, 7, (38, 1))
        backend.close()


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("rate", [-30.0, 30.0], ids=["none", "the strongest"])
def test_a_time_mixing_with_extreme_decay_equals_the_reference(
    device: str, tmp_path: Path, rate: float
) -> None:
    with opened(ZOO["rwkv7"], tmp_path, (0, 1)) as decoder:
        layers = []
        for layer in decoder.weights.layers:
            blocks = [
                each.with_block(replace(each.block, w0=np.full_like(each.block.w0, rate)))
                if isinstance(each.block, Rwkv7TimeMixWeights)
                else each
                for each in layer.blocks
            ]
            layers.append(LayerWeights(tuple(blocks)))
        extreme = Decoder(decoder.specification, replace(decoder.weights, layers=tuple(layers)))
        backend = extreme.backend(device, chunk=40)
        check(extreme, backend, extreme.ids(43), 0, (40, 1, 2))
        backend.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_is_restored_to_an_earlier_position(device: str, tmp_path: Path, kind: str) -> None:
    with opened(ZOO[kind], tmp_path, KINDS[kind]) as decoder:
        ids = decoder.ids(24)
        backend = decoder.backend(device)
        read(backend, ids[:16], (12, 4), expected=1)
        arrays = [array.copy() for array in backend.snapshot(16)]
        read(backend, list(reversed(ids)), (16, 1), expected=1)
        backend.restore(arrays, 16)
        assert backend.rewind(14) == 14
        check(decoder, backend, ids, 14, (2, 1))
        backend.close()
