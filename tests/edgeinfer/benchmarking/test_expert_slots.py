"""A dense model as a MoE model: neurons that are active together form an expert."""

import numpy as np
import pytest

from expert_slots import grouped, most_active, recorded_traces


def test_neurons_that_are_active_together_are_grouped() -> None:
    random = np.random.default_rng(0)
    topic = random.integers(0, 4, 300)
    owner = random.permutation(np.repeat(np.arange(4), 8))
    active = (topic[:, None] == owner[None, :]) & (random.random((300, 32)) < 0.9)
    group = grouped(active, 4)
    assert sorted(np.bincount(group)) == [8, 8, 8, 8]
    for own in range(4):
        assert len(set(group[owner == own])) == 1


def test_a_token_selects_the_groups_with_the_most_active_neurons() -> None:
    active = np.array([[1, 1, 0, 1, 0, 0], [0, 0, 0, 1, 1, 1]], np.bool_)
    selected = most_active(active, np.array([0, 0, 1, 1, 2, 2]), 2)
    assert selected.tolist() == [[0, 1], [2, 1]]


@pytest.mark.slow
def test_the_built_in_model_has_a_trace_for_every_layer() -> None:
    text = "Once upon a time there was a little dog. He liked to run in the park."
    traces = recorded_traces("tiny", [text], 16, 16, 3, 1)
    assert len(traces) == 10
    assert {trace.shape for trace in traces} == {(16, 3)}
    assert all(len(set(row)) == 3 for trace in traces for row in trace.tolist())
