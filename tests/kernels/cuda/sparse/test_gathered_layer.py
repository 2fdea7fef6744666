"""What the benchmark of gathered layers times: planted feed-forwards, dense and gathered, agree."""

import numpy as np
import pytest
import torch

from edgeinfer_kernels.cpu.sparse import dense_layer
from harness.hot_neurons.gathered_layer import Layers, byte_share, planted
from harness.planted_neurons import find_planted, planted_inputs
from tests.kernels.without_interpreter import output_without_interpreter


def test_dense_and_gathered_layers_agree_and_list_the_planted_share(device: str) -> None:
    shape = find_planted("smoke")
    spec, weights = planted(shape, "Q4_0", 0.1)
    x = planted_inputs(shape, 2, 1)
    found = []
    for gathered in ((), (0, 1)):
        layers = Layers.on(torch.device(device), spec, weights, gathered)
        layers.launch(torch.from_numpy(x).to(device))
        found.append(layers.result(2))
    assert np.linalg.norm(found[1][0] - found[0][0]) < 1e-3 * np.linalg.norm(found[0][0] - x)
    layers.scale_biases(0.5)
    layers.launch(torch.from_numpy(x).to(device))
    assert layers.result(2)[1] > found[1][1] + 0.1
    assert found[0][1] == 0
    assert 0.1 < found[1][1] < 0.3  # of either of two tokens
    assert 0.4 < byte_share(dense_layer(weights, 0), 0.1) < byte_share(dense_layer(weights, 0), 0.3) < 0.7


COMPILE = """
from harness.hot_neurons.gathered_layer import compiled_rows
from harness.planted_neurons import find_planted

print(*(row[0] for row in compiled_rows(find_planted("smoke"), "Q4_0", (1,))))
"""


@pytest.mark.slow
def test_the_kernels_of_the_smoke_run_compile() -> None:
    """In a process without the interpreter."""
    names = output_without_interpreter("-c", COMPILE).split()
    assert {"sparse_gated_kernel", "gathered_down_kernel", "list_active_kernel"} <= set(names)
