"""Logits of a split model are compared with those of the CPU."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")

from edgeinfer.errors import EdgeInferError
from edgeinfer_offload.planner.plan_types import PlanOptions
from edgeinfer_offload.planner.planner import plan_memory
from split_steps import CLOSE, HEAD, SplitStepRow, distance, split_step_rows
from tests.model_zoo import ZOO
from tests.offload.model_shapes import GIB, laptop, moe_model


def test_the_distance_is_that_of_the_median_row() -> None:
    expected = np.ones((3, 4), np.float32)
    result = expected.copy()
    result[1] *= 3
    assert distance(result, expected) == 0
    result[2] *= 1.5
    assert distance(result, expected) == pytest.approx(0.5)


def test_a_row_shows_both_speeds_and_whether_logits_agree() -> None:
    plan = plan_memory(moe_model(), laptop(), PlanOptions(1024, vram=3 * GIB))
    row = SplitStepRow("m", 3 * GIB, plan, 12.3456, 321.4, 0.01, 0.02, 0.75)
    cells = dict(zip(HEAD, row.cells(), strict=True))
    assert (cells["GPU memory"], cells["measured ms/token"], cells["prompt t/s"]) == (
        "3.00 GiB",
        "12.346",
        "321",
    )
    assert cells["planned ms/token"] == f"{plan.ms_per_token:.3f}"
    assert (cells["logits of a step"], cells["experts on the CPU"]) == ("0.0100", "75%")
    assert row.is_close
    assert not replace(row, prompt_distance=2 * CLOSE).is_close
    assert replace(row, experts_here=None).cells()[-1] == ""


def test_a_model_that_is_not_split_is_named(tmp_path: Path) -> None:
    path = ZOO["llama"].write(tmp_path / "m.gguf")
    with pytest.raises(EdgeInferError, match=r"m with 0\.00 GiB: not split"):
        list(split_step_rows(path, [0.5], context=128, generated=2, rounds=1, threads=1, device="cpu"))
