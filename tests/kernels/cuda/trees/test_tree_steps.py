"""A tree of draft tokens in one step: each token has the logits of its path, and a kept path is the text."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.caches.tree_pages import tree_positions
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.trees.tree_words import tree_places, tree_rows
from tests.kernels.cuda.conftest import HAS_GPU
from tests.kernels.cuda.decoders import FLOATS_AGREE, Decoder, Logits, opened, read
from tests.model_zoo import ZOO
from tests.random_models import RandomModel
from tests.zoo.ring_layers import with_rings

DEVICE = "cuda" if HAS_GPU else "cpu"
PARENTS = (-1, -1, 1, 0, 1, 2, 4)
"""Branches of branches, two of three levels; the most probable path isn't in order."""
PATHS = ([0], [1, 2, 5], [1, 4, 6], [0, 3])
"""Nodes of the tree, those of each path."""
LENGTH = 20
"""Tokens of the text, with the one after which the tree begins."""
RING = 32
"""A window of 6 and chunks of 16 need 21 positions, and a tree 8 more: it is at both ends of the ring."""
MODELS: dict[str, tuple[RandomModel, tuple[int, ...]]] = {
    "llama": (ZOO["llama"], (0, 1)),
    "windows": (ZOO["gemma3"], (4, 5)),
    "latent attention": (ZOO["deepseek2"], (0, 1)),
    "experts": (ZOO["qwen3moe"], (0, 1)),
    "ALiBi": (ZOO["bloom"], (0,)),
    "learned positions": (ZOO["gpt2"], (0, 1)),
    "norms of rows": (ZOO["olmo2"], (0, 1)),
    "gated delta net": (ZOO["qwen35"], (0, 1)),
    "Kimi Delta Attention": (ZOO["kimi-linear"], (0, 3)),
    "Mamba-2": (ZOO["mamba2-groups"], (0, 1)),
    "short convolution": (ZOO["lfm2"], (0, 1)),
}
KINDS: tuple[tuple[str, CacheType], ...] = (
    *((model, "f16") for model in MODELS),
    ("llama", "fp8"),
    *((model, kind) for model in ("llama", "latent attention") for kind in ("q8_0", "q4_0")),
)


def expected_rows(
    decoder: Decoder, backend: CudaBackend, text: Sequence[int], path: Sequence[int], kind: CacheType
) -> Logits:
    """The logits after the text and after each token of a path: of the formula with a float16 cache, else of
    the same kernels, as a rounded element may get either of two codes.
    """
    if kind == "f16":
        return decoder.reference_logits([*text, *path])[len(text) - 1 :]
    rows = read(backend, [text[-1], *path], (1 + len(path),), 1 + len(path), LENGTH - 1)
    return np.stack([rows[at] for at in range(1 + len(path))])


def agrees(actual: Logits, expected: Logits, kind: CacheType) -> bool:
    tolerance = FLOATS_AGREE * (1 if kind == "f16" else 2)
    return float(np.linalg.norm(actual - expected)) < tolerance * float(np.linalg.norm(expected))


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(("model", "kind"), KINDS)
def test_the_tokens_of_a_tree_have_the_logits_of_their_paths(
    tmp_path: Path, model: str, kind: CacheType
) -> None:
    of, layers = MODELS[model]
    with opened(of, tmp_path, layers) as decoder:
        ids = decoder.ids(LENGTH + len(PARENTS) + 1)
        text, nodes, after = ids[:LENGTH], ids[LENGTH:-1], ids[-1]
        backend = decoder.backend(DEVICE, kv=kind)
        read(backend, text, (16, LENGTH - 17))
        x = backend.embed([text[-1], *nodes])
        backend.forward_tree(x, LENGTH - 1, PARENTS)
        logits = backend.logits(x).astype(np.float64)
        kept = PATHS[2]
        backend.keep_path(LENGTH - 1, PARENTS, [0, *(1 + node for node in kept)])
        continued = read(backend, [after], (1,), start=LENGTH + len(kept))[0]
        for path in PATHS if kind == "f16" else [kept]:
            tokens = [*(nodes[node] for node in path), after]
            expected = expected_rows(decoder, backend, text, tokens, kind)
            assert agrees(logits[[0, *(1 + node for node in path)]], expected[:-1], kind), path
            assert path != kept or agrees(continued, expected[-1], kind)
        backend.close()


RECURRENT = ("gated delta net", "Kimi Delta Attention", "Mamba-2", "short convolution")


@pytest.mark.slow
@pytest.mark.parametrize("model", RECURRENT)
def test_trees_after_each_other_continue_recurrent_states(tmp_path: Path, model: str) -> None:
    """Of two trees a path is kept; the second and the tokens after it process pending positions."""
    of, layers = MODELS[model]
    with opened(of, tmp_path, layers) as decoder:
        ids = decoder.ids(LENGTH + 3 * len(PARENTS))
        backend, text = decoder.backend(DEVICE), ids[:LENGTH]
        read(backend, text, (16, LENGTH - 17))
        for path in (PATHS[2], [], PATHS[1]):
            start = len(text) - 1
            nodes = ids[len(text) : len(text) + len(PARENTS)]
            x = backend.embed([text[-1], *nodes])
            backend.forward_tree(x, start, PARENTS)
            rows = [0, *(1 + node for node in path)]
            logits = backend.logits(x)[rows].astype(np.float64)
            backend.keep_path(start, PARENTS, rows)
            text += [nodes[node] for node in path]
            expected = decoder.reference_logits(text)[start:]
            assert agrees(logits, expected, "f16")
            text = [*text, 5]
        found = read(backend, [*text[-1:], 7, 8, 9], (3, 1), 4, len(text) - 1)
        expected = decoder.reference_logits([*text, 7, 8, 9])[-4:]
        assert agrees(np.stack([found[at] for at in range(4)]), expected, "f16")
        backend.close()


def test_the_best_tokens_of_a_tree_are_found_on_the_device(tmp_path: Path) -> None:
    with opened(ZOO["llama"], tmp_path, (0,)) as decoder:
        backend, ids = decoder.backend(DEVICE), decoder.ids(4)
        best = backend.best_ids(ids, 0, (-1, -1, 0))
        backend.forward_tree(x := backend.embed(ids), 0, (-1, -1, 0))
        assert best == backend.logits(x).argmax(axis=1).tolist()
        backend.close()


@pytest.mark.slow
@pytest.mark.parametrize("start", [30, 32, 40])
def test_a_tree_in_a_ring_gives_the_bits_of_a_whole_cache(tmp_path: Path, start: int) -> None:
    of, layers = MODELS["windows"]
    rows = []
    with opened(of, tmp_path, layers) as decoder:
        ids = decoder.ids(start + 12)
        for size in (RING, 0):
            spec = with_rings(decoder.specification, size)
            backend = replace(decoder, specification=spec).backend(DEVICE)
            read(backend, ids, (16, min(start, 32) - 16, *[start - 32] * (start > 32)))
            x = backend.embed(ids[start : start + 1 + len(PARENTS)])
            backend.forward_tree(x, start, PARENTS)
            logits = [backend.logits(x)]
            backend.keep_path(start, PARENTS, [0, 2, 5, 7])
            rows.append([*logits, *read(backend, ids[-4:], (1, 3), 3, start + 4).values()])
            backend.close()
    for ring, whole in zip(*rows, strict=True):
        np.testing.assert_array_equal(ring, whole)


def test_the_places_of_a_tree_follow_its_paths() -> None:
    positions, masks = tree_places(9, tree_rows(PARENTS))
    assert positions == tree_positions(9, PARENTS) == [9, 10, 10, 11, 11, 11, 12, 12]
    assert masks == [0b1, 0b11, 0b101, 0b1101, 0b10011, 0b100101, 0b1001101, 0b10100101]


@pytest.mark.parametrize(("kind", "most"), [("f16", 16), ("q4_0", 8)])
def test_a_tree_has_as_many_tokens_as_a_step(tmp_path: Path, kind: CacheType, most: int) -> None:
    with opened(ZOO["llama"], tmp_path, (0,)) as decoder:
        backend = decoder.backend(DEVICE, kv=kind, step_tokens=16)
        assert backend.capabilities.max_tree_tokens == most
        backend.close()
