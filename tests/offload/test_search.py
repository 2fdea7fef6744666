"""The greedy search finds plans about as fast as the exhaustive one's, in a fraction of a second."""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product

import pytest

from edgeinfer.errors import EdgeInferError
from edgeinfer.planning.device_plan import plan_devices
from edgeinfer.planning.plan_request import PlanRequest
from edgeinfer.shapes.known_shapes import find_shape
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.machine.description import describe_machine
from edgeinfer_offload.planner import placement_problem
from edgeinfer_offload.planner.memory_plan import MemoryPlan
from harness.empty_decoders import empty_decoder
from tests.net.golden_net import GIBIBYTES, MACHINES, SHAPES
from tests.offload.search_oracle import OracleSearch

MAX_SLOWDOWN = 1.015
"""The plan's milliseconds per token relative to the oracle's."""
CASES = list(product(SHAPES, MACHINES, GIBIBYTES))


@cache
def sizes_of(shape: str) -> ModelSizes:
    """The sizes of a model of this shape."""
    return ModelSizes.of(*empty_decoder(find_shape(shape), "Q4_K_M"))


def planned(shape: str, machine: str, gibibytes: float) -> MemoryPlan | None:
    """The plan with a budget of GPU memory, or of main memory without a GPU; None: nothing fits."""
    vram, ram = (None, int(gibibytes * 2**30)) if machine == "cpu" else (int(gibibytes * 2**30), None)
    request = PlanRequest(shape, sizes_of(shape), 4096, 131072, vram=vram, ram=ram)
    try:
        return plan_devices(request, describe_machine(MACHINES[machine])).memory
    except EdgeInferError:
        return None


def slowdowns(cases: list[tuple[str, str, float]], monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """The plan's time per token relative to that of the exhaustive search."""
    for case in cases:
        result = planned(*case)
        with monkeypatch.context() as patched:
            patched.setattr(placement_problem, "Search", OracleSearch)
            oracle = planned(*case)
        assert (result is None) == (oracle is None), case
        if result and oracle:
            yield result.ms_per_token / oracle.ms_per_token


@pytest.mark.slow
def test_a_plan_is_about_as_fast_as_the_exhaustive_search(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(slowdowns(CASES[::19], monkeypatch)) <= MAX_SLOWDOWN


@pytest.mark.slow
def test_every_plan_is_about_as_fast_as_the_exhaustive_search(
    monkeypatch: pytest.MonkeyPatch, scaled: Callable[[int], int]
) -> None:
    assert max(slowdowns(CASES[:: 5 // scaled(5)], monkeypatch)) <= MAX_SLOWDOWN
