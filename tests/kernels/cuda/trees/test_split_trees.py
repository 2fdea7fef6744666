"""Trees of a model that is split between a GPU and the CPU: rows on one, pages on the other."""

from pathlib import Path

import numpy as np
import pytest

from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from tests.kernels.cuda.decoders import opened
from tests.kernels.cuda.offload.test_split_backend import (
    TOLERANCE,
    Divide,
    attention_alone,
    layers_for,
    mixed,
    model_for,
    read_split,
    split_halves,
)
from tests.kernels.cuda.split_decoders import split_decoder
from tests.kernels.cuda.trees.test_tree_steps import PARENTS, PATHS

LENGTH = 15
"""Tokens of the text, with the one after which the tree begins: paths end on the next page."""
CASES = [
    ("llama", mixed),
    ("gemma3", mixed),
    ("deepseek2", attention_alone),
    ("qwen2moe", split_halves),
    ("qwen35", mixed),
    ("lfm2", mixed),
]


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(("name", "split_rule"), CASES)
def test_the_tokens_of_a_split_tree_have_the_logits_of_their_paths(
    device: str, kernels: Kernels, tmp_path: Path, name: str, split_rule: Divide
) -> None:
    with opened(model_for(name, split_rule), tmp_path, layers_for(name, split_rule)) as decoder:
        splits = [split_rule(decoder, index) for index in range(len(decoder.weights.layers))]
        ids = decoder.ids(LENGTH + len(PARENTS) + 1)
        text, nodes, after = ids[:LENGTH], ids[LENGTH:-1], ids[-1]
        with split_decoder(decoder, device, splits, kernels) as backend:
            assert backend.capabilities.max_tree_tokens == 8
            read_split(backend, text[:-1], (9, LENGTH - 10))
            x = backend.embed([text[-1], *nodes])
            backend.forward_tree(x, LENGTH - 1, PARENTS)
            logits, kept = backend.logits(x).astype(np.float64), PATHS[2]
            backend.keep_path(LENGTH - 1, PARENTS, [0, *(1 + node for node in kept)])
            x = backend.embed([after])
            backend.forward(x, LENGTH + len(kept))
            continued = backend.logits(x)[0].astype(np.float64)
        for path in PATHS:
            expected = decoder.reference_logits([*text, *(nodes[node] for node in path), after])[LENGTH - 1 :]
            actual = [*logits[[0, *(1 + node for node in path)]], *([continued] if path == kept else [])]
            for row, wanted in zip(actual, expected, strict=False):
                assert np.linalg.norm(row - wanted) < TOLERANCE * np.linalg.norm(wanted), path
