"""The sparse benchmark: the requested neurons are active, and every mode computes the same feed-forward."""

import numpy as np
import pytest

from edgeinfer_kernels.cpu.sparse import dense_layer
from harness.planted_neurons import find_planted, normed_inputs, planted_decoder, planted_inputs
from harness.sparse_runs import planted_run


@pytest.mark.parametrize("active", [0.2])
def test_the_requested_share_of_neurons_is_active(active: float) -> None:
    shape = find_planted("smoke")
    _, weights = planted_decoder(shape, "Q8_0", 1, active)
    w = dense_layer(weights, 0)
    assert w.ffn_gate is not None
    x = normed_inputs(planted_inputs(shape, 2000, 3))
    fires = x @ w.ffn_gate.decoded().T + np.asarray(w.ffn_gate_bias) > 0
    assert fires.mean() == pytest.approx(active, abs=0.02)


def test_every_mode_is_timed_and_exact_mode_is_exact() -> None:
    (run,) = planted_run(find_planted("smoke"), "Q4_0", 0.2, [1], 1, lambda line: None)
    assert list(run.timings) == ["dense", "exact", "predicted"]
    assert run.errors["dense"] == 0
    assert run.errors["exact"] < 1e-5
    assert run.errors["exact"] < run.errors["predicted"] < 0.1
    assert run.trained is not None
    assert run.trained.recall > 0.97
    assert run.dense_bytes == 3 * 256 * 512 // 32 * 18
    assert all(np.isfinite(timings.seconds_at(0.5)) for timings in run.timings.values())
