"""Draft trees of models with recurrent states: each path has the logits of its tokens alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import edgeinfer
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.speculation.speculator import Speculator
from edgeinfer_kernels.recurrent_state import StateSlots
from tests.edgeinfer.speculation.test_tree import FixedTree, always_tree
from tests.kernels.cpu.test_cpu_backend import cpu, engine_for
from tests.model_zoo import ZOO
from tests.random_models import VOCABULARY

PARENTS = (-1, -1, 1, 0, 2, 1, 4, 4)
PATHS = ([0, 3], [1, 2, 4, 6], [1, 2, 4, 7], [1, 5])
IDS = np.random.default_rng(3).integers(3, VOCABULARY, 400).tolist()
KINDS = [
    "lfm2",
    "qwen35",
    "mamba2-groups",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("kimi-linear", "falcon-h1", "nemotron_h")),
]


def engine(tmp_path: Path, kind: str) -> NativeEngine:
    return engine_for(ZOO[kind].write(tmp_path / "model.gguf"), cpu(), context=256)


def logits_alone(tested: NativeEngine, text: list[int], count: int) -> npt.NDArray[np.float32]:
    """The logits after the last `count` tokens of a text, which are processed one by one."""
    tested.rewind(0)
    if len(text) > count:
        tested.append(text[:-count])
    return np.array([tested.append([token]) for token in text[-count:]])


@pytest.mark.parametrize("kind", KINDS)
def test_each_path_of_a_tree_has_the_bits_of_single_tokens(tmp_path: Path, kind: str) -> None:
    tested, length = engine(tmp_path, kind), 21
    text, nodes = IDS[:length], IDS[length : length + len(PARENTS)]
    expected = [
        logits_alone(tested, [*text, *(nodes[node] for node in path)], 1 + len(path)) for path in PATHS
    ]
    tested.rewind(0)
    tested.append(text[:-1])
    for _ in range(2):  # A tree that is processed again, as nothing of it was kept.
        logits = tested.append_tree([text[-1], *nodes], PARENTS)
        for path, wanted in zip(PATHS, expected, strict=True):
            np.testing.assert_array_equal(logits[[0, *(1 + node for node in path)]], wanted)
    tested.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_of_accepted_paths_continues_as_one_of_single_tokens(tmp_path: Path, kind: str) -> None:
    """Trees, of which paths of all lengths are accepted, between steps of one and of several tokens."""
    tested, length = engine(tmp_path, kind), 120
    expected = logits_alone(tested, IDS[:length], length - 3)
    tested.rewind(0)
    tested.append(IDS[:3])
    steps, end = iter((0, 4, 2, 1, 4, 4, 3, 0, 4, 4, 4, 4, 1, 2, 4) * 4), 3
    while end + 12 < length:
        accepted = next(steps)
        if accepted == 3:
            actual = tested.append_all([*IDS[end : end + 3], 5, 6])[:3]
            tested.rewind(end + 3)
            kept = 3
        else:
            path = PATHS[1][:accepted]
            nodes = [7 + node for node in range(len(PARENTS))]
            for index, node in enumerate(path):
                nodes[node] = IDS[end + 1 + index]
            rows = [0, *(1 + node for node in path)]
            kept = len(rows)
            actual = tested.append_tree([IDS[end], *nodes], PARENTS)[rows]
            tested.keep_path(IDS[end : end + kept], PARENTS, rows)
        np.testing.assert_array_equal(actual, expected[end - 3 : end - 3 + kept])
        end += kept
        assert tested.ids == IDS[:end]
    snapshot = tested.snapshot()
    assert snapshot is not None
    snapshot = replace(snapshot, arrays=[array.copy() for array in snapshot.arrays])
    np.testing.assert_array_equal(tested.append([IDS[end]]), expected[end - 3])
    tested.restore(snapshot, end)
    np.testing.assert_array_equal(tested.append([IDS[end]]), expected[end - 3])
    tested.rewind(end - 5)
    actual = np.array([tested.append([token]) for token in IDS[end - 5 : end]])
    np.testing.assert_allclose(actual, expected[end - 8 : end - 3], atol=1e-5)
    tested.close()


def test_a_tree_after_the_position_of_a_slot_takes_no_other_slot() -> None:
    slots = StateSlots(8)
    slots.begin(0, 10)
    slots.checkpoint()
    step = slots.begin_tree(10, 6)
    assert step.pending == 0
    assert step.source == step.target
    slots.keep_path(3)
    assert slots.end == 13
    step = slots.begin_tree(13, 6)
    assert (step.pending, step.source != step.target) == (3, True)
    assert slots.description().tolist() == [[13, 0, 10, 13]]


@pytest.mark.parametrize("kind", ["mamba", "rwkv7"])
def test_other_recurrent_blocks_take_no_tree(tmp_path: Path, kind: str) -> None:
    tested = engine(tmp_path, kind)
    assert not tested.capabilities.max_tree_tokens
    assert not tested.holds_tree(PARENTS)
    tested.close()


@pytest.mark.parametrize("kind", ["lfm2", "qwen35"])
def test_completions_with_accepted_paths_equal_baseline_decoding(tmp_path: Path, kind: str) -> None:
    path = replace(ZOO[kind], context=256).write(tmp_path / "model.gguf")
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0}
    with edgeinfer.load(path, draft=None, device="cpu", threads=1, context=256) as model:
        expected = model.generate(IDS[:9], **options)
        answer = [*expected.prompt_ids, *expected.ids]
        model.speculator = Speculator(model.engine, FixedTree(answer, PARENTS, PATHS[1]))
        always_tree(model, 4, len(PARENTS))
        model.engine.rewind(0)
        actual = model.generate(IDS[:9], **options)
        assert actual.ids == expected.ids
        assert actual.speed.tokens_per_forward is not None
        assert actual.speed.tokens_per_forward > 2
        model.speculator = None
