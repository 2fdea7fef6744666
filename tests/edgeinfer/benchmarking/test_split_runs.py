"""How many layers llama.cpp offloads to a GPU of a given size, and rows of split models."""

from pathlib import Path

import pytest

from edgeinfer.benchmarking.speed_runs import BenchedModel
from edgeinfer.benchmarking.timings import Timings
from edgeinfer.benchmarking.workloads import Workload
from edgeinfer.planning.model_plan import model_sizes
from harness.split_runs import HEAD, SplitRow, SplitSuite, llama_cpp_settings
from tests.model_zoo import ZOO
from tests.offload.model_shapes import GIB, dense_model


def test_llama_cpp_offloads_as_many_layers_as_the_budget_holds() -> None:
    sizes = dense_model()
    layer = sum(matrix.nbytes for matrix in sizes.layers[0].matrices())
    layer += sizes.layers[0].blocks[0].state_bytes(1024, "f16")
    head = sizes.head.nbytes
    for budget, layers in [
        (head - 1, "0"),
        (head, "1"),
        (head + 3 * layer - 1, "3"),
        (head + 3 * layer, "4"),
        (head + 99 * layer, "33"),
    ]:
        assert llama_cpp_settings(sizes, 1024, budget) == [("-ngl", layers)]


def test_a_row_compares_with_the_prediction_and_with_llama_cpp() -> None:
    ours, theirs = Timings((0.5, 0.5), 4), Timings((1.0, 1.0), 4)
    row = SplitRow("m", 3 * GIB, Workload("generate", 4), "1 of 2 layers", 10.0, ours, theirs, "-ngl 2")
    cells = dict(zip(HEAD[:4], row.cells()[:4], strict=True))
    assert cells == {"model": "m", "budget": "3.00 GiB", "test": "tg4", "edgeinfer": "1 of 2 layers"}
    assert row.cells()[6] == row.cells()[9] == "2.00x"
    assert row.cells()[-3:] == ["10.0", "0.80", "-ngl 2"]


@pytest.mark.slow
def test_a_model_is_measured_at_each_budget(tmp_path: Path) -> None:
    path = ZOO["llama"].write(tmp_path / "m.gguf")
    program = tmp_path / "llama-bench"
    program.write_text(
        "#!/bin/sh\n"
        'echo \'[{"n_prompt": 0, "n_gen": 4, "n_depth": 0, "samples_ns": [2000000, 1000000], "cpu_info": "x",'
        ' "backends": "none", "build_commit": "0"}]\'\n'
    )
    program.chmod(0o755)
    suite = SplitSuite([BenchedModel.find(path)], [0.5, 1.5], program, 1, 1, 2, "cpu")
    rows = list(suite.compare([Workload("generate", 4)]))
    assert [row.budget for row in rows] == [int(share * model_sizes(path).nbytes) for share in (0.5, 1.5)]
    for row in rows:
        assert len(row.ours.seconds) == 2
        assert row.theirs is not None
        assert row.theirs.seconds == (0.002, 0.001)
        assert row.setting.startswith("-ngl ")
        assert row.planned_rate > 0
        assert row.placed == "0 of 3 layers"
