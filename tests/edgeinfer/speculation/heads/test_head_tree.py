"""Trees of draft heads: each node has the logits of its path, evaluated token by token."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.model_config.layers.draft_head import DraftHeadModel
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.drafter import DraftRequest
from edgeinfer.speculation.heads.head_tree import HeadTree
from edgeinfer.speculation.trees.tree_growth import ROOT, TreeGrowth
from edgeinfer_kernels.backend import Backend
from tests.edgeinfer.speculation.heads.eagle.random_eagle import RandomEagle
from tests.kernels.heads.test_draft_head import IDS, exact, on_cpu, states
from tests.kernels.heads.test_draft_head import head_of as mtp_head
from tests.kernels.heads.test_eagle_head import head_of as eagle_head

POSITIONS = 96


def head_of(name: str, folder: Path) -> tuple[DraftHeadModel, int]:
    """A head, and the width of the states that it reads."""
    if name == "eagle3":
        return eagle_head(RandomEagle(own_table=True), folder), 3 * 64
    head = mtp_head(name, folder)
    return head, head.spec.hidden_size


def begun(backend: Backend[Any], width: int, count: int) -> np.ndarray:
    """The row after `count` pairs."""
    backend.set_hidden(states(width)[:count], 0)
    x = backend.embed(IDS[:count])
    backend.forward(x, 0)
    return np.asarray(x[-1:]).copy()


def along(backend: Backend[Any], row: np.ndarray, path: list[int], start: int) -> np.ndarray:
    """The logits after the tokens of a path, evaluated one by one."""
    for position, token in enumerate(path, start):
        backend.set_own_hidden(row, position)
        x = backend.embed([token])
        backend.forward(x, position)
        row = np.asarray(x).copy()
    return np.asarray(backend.logits(row)[0])


@pytest.mark.parametrize("count", [3, 14])
@pytest.mark.parametrize("name", ["qwen35", "glm4moe", "eagle3"])
def test_each_node_has_the_logits_of_its_path(name: str, count: int, tmp_path: Path) -> None:
    head, width = head_of(name, tmp_path)
    rng = random.Random(3)
    for backend in (on_cpu(head), exact(head)):
        row = begun(backend, width, count)
        tree = HeadTree(backend, row, count, 7, POSITIONS)
        growth = TreeGrowth(DraftRequest(7, SamplingParams(), max_nodes=99), 3)
        growth.add(ROOT, [(token, 0.3) for token in rng.sample(range(3, 280), 3)])
        found = dict[int, np.ndarray]()
        for level in range(1, 5):
            nodes = growth.frontier(3)
            wanted = [(node, growth.parents[node], growth.ids[node]) for node in nodes]
            rows = tree.evaluate(wanted, level)
            assert rows
            found |= {node: logits.copy() for node, logits in rows}
            growth.begin_level()
            for node, _ in rows:
                growth.add(node, [(token, rng.random()) for token in rng.sample(range(3, 280), 3)])
        for node, logits in found.items():
            expected = along(backend, row, growth.path(node), count)
            np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())
        backend.close()


def test_nodes_without_a_free_page_are_left_out(tmp_path: Path) -> None:
    head, width = head_of("eagle3", tmp_path)
    backend = on_cpu(head)
    row = begun(backend, width, 3)
    tree = HeadTree(backend, row, 3, 7, 32)
    assert [node for node, _ in tree.evaluate([(0, ROOT, 5), (1, ROOT, 6), (2, ROOT, 7)], 1)] == [0, 1]
    backend.close()
