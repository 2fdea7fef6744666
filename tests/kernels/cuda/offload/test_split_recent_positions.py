"""Recent positions in f16 of a split model: those of the CPU's layers and of the GPU's, in steps, in a prompt
and in sequences with pages.
"""

from pathlib import Path

import numpy as np
import pytest

from edgeinfer_kernels.backend import BatchPositions
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from tests.kernels.cuda.cache.test_recent_positions import COUNTS, FOUR_BITS, SAME_CODES, of_cpu
from tests.kernels.cuda.decoders import opened
from tests.kernels.cuda.offload.test_split_backend import TOLERANCE, mixed, read_split
from tests.kernels.cuda.split_decoders import split_decoder
from tests.model_zoo import ZOO

RECENT = 48
"""Positions of which each is recent for the others."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "deepseek2"])
def test_steps_and_prompts_equal_those_of_the_cpu(
    device: str, kernels: Kernels, tmp_path: Path, name: str
) -> None:
    with opened(ZOO[name], tmp_path) as decoder:
        splits = [mixed(decoder, index) for index in range(len(decoder.weights.layers))]
        ids = decoder.ids(sum(COUNTS))
        with split_decoder(decoder, device, splits, kernels, kv=FOUR_BITS) as backend:
            assert backend.capabilities.max_tree_tokens == 0
            result = read_split(backend, ids, COUNTS)
        expected, truth = of_cpu(decoder, FOUR_BITS, ids), decoder.reference_logits(ids)
        for at in sorted(expected.keys() & result.keys()):
            row = result[at].astype(np.float64)
            assert np.linalg.norm(row - expected[at]) < 2 * SAME_CODES * np.linalg.norm(expected[at])
            if at < RECENT:
                assert np.linalg.norm(row - truth[at]) < TOLERANCE * np.linalg.norm(truth[at])


def test_sequences_in_pages_have_their_recent_positions(
    device: str, kernels: Kernels, tmp_path: Path
) -> None:
    with opened(ZOO["llama"], tmp_path) as decoder:
        splits = [mixed(decoder, index) for index in range(len(decoder.weights.layers))]
        ids, lengths = decoder.ids(42), (20, 20)
        texts, tables = [ids[:21], ids[21:]], np.array([[2, 0], [1, 3]])
        with split_decoder(decoder, device, splits, kernels, kv=FOUR_BITS) as backend:
            for text, table in zip(texts, tables, strict=True):
                for first, last in ((0, 16), (16, 20)):
                    x = backend.embed(text[first:last])
                    pages = np.broadcast_to(table, (last - first, 2))
                    backend.forward_batch(x, BatchPositions(np.arange(first, last), pages))
            x = backend.embed([text[-1] for text in texts])
            backend.forward_batch(x, BatchPositions(np.array(lengths), tables))
            rows = backend.logits(x).astype(np.float64)
        for row, text in zip(rows, texts, strict=True):
            truth = decoder.reference_logits(text)[-1]
            assert np.linalg.norm(row - truth) < TOLERANCE * np.linalg.norm(truth)
