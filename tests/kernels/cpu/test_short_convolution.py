"""Recurrent state: steps equal a batch; rewinding and snapshots equal evaluating again."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import SettingError
from edgeinfer.generation.context_shift import ContextShift
from edgeinfer_kernels.cpu.runtime.abi import CHECKPOINT_POSITIONS, RING_ROWS
from edgeinfer_kernels.recent_rows import RecentRows, RewindLimit, rows_for
from tests.kernels.cpu.test_cpu_backend import Build, cpu, engine_for, exact, relative
from tests.model_zoo import ZOO
from tests.random_models import VOCABULARY

CONTEXT = 640
IDS = np.random.default_rng(3).integers(3, VOCABULARY, 600).tolist()
MODEL = ZOO["lfm2"]


def engine(tmp_path: Path, build: Build) -> NativeEngine:
    return engine_for(MODEL.write(tmp_path / "model.gguf"), build, context=CONTEXT)


@pytest.mark.parametrize("hidden", [64, 80])
@pytest.mark.parametrize("taps", [2, 3, 5])
def test_a_prompt_and_steps_equal_the_reference(tmp_path: Path, hidden: int, taps: int) -> None:
    model = replace(MODEL, width=hidden, taps=taps)
    path = model.write(tmp_path / "model.gguf")
    expected = engine_for(path, exact).append_all(IDS[:100])
    tested = engine_for(path, cpu())
    parts = [tested.append_all(IDS[first:last]) for first, last in ((0, 70), (70, 71), (71, 73), (73, 100))]
    tested.close()
    assert relative(np.concatenate(parts), expected) < 5e-6


def test_a_prompt_equals_single_steps_to_the_bit(tmp_path: Path) -> None:
    tested = engine(tmp_path, cpu())
    expected = tested.append_all(IDS[:300])
    tested.rewind(0)
    actual = np.stack([tested.append([token]) for token in IDS[:300]])
    tested.close()
    np.testing.assert_array_equal(actual[:250], expected[:250])
    assert relative(actual, expected) < 1e-6


@pytest.mark.parametrize("length", [598, 560, 540, 513, 512, 511, 300, 256, 255, 2, 1])
@pytest.mark.parametrize("build", [cpu(), exact], ids=["cpu", "reference"])
def test_a_rewound_state_continues_as_if_later_tokens_were_never_evaluated(
    tmp_path: Path, build: Build, length: int
) -> None:
    tested = engine(tmp_path, build)
    expected = tested.append_all(IDS)[length:]
    tested.rewind(length)
    assert tested.ids == IDS[:length]
    result = tested.append_all(IDS[length:])
    # The second time, the ring may hold the rows of later positions.
    tested.rewind(max(1, length - 3))
    again = tested.append_all(IDS[max(1, length - 3) :])[-len(expected) :]
    tested.close()
    assert relative(result, expected) < 1e-6
    assert relative(again, expected) < 1e-6


@pytest.mark.parametrize("length", [600, 599, 550, 512, 400, 100])
def test_a_snapshot_is_restored_to_any_length(tmp_path: Path, length: int) -> None:
    tested = engine(tmp_path, cpu())
    expected = tested.append_all(IDS)
    snapshot = tested.snapshot()
    snapshot = replace(snapshot, arrays=[array.copy() for array in snapshot.arrays])
    tested.rewind(0)
    tested.append_all(IDS[::-1])
    tested.restore(snapshot, length)
    assert tested.ids == IDS[:length]
    result = tested.append_all([7, 8])
    tested.rewind(0)
    again = tested.append_all([*IDS[:length], 7, 8])[-2:]
    tested.close()
    assert relative(result, again) < 5e-6
    assert expected.shape == (600, VOCABULARY)


def test_no_token_can_be_evicted(tmp_path: Path) -> None:
    tested = engine(tmp_path, cpu())
    assert not tested.capabilities.max_batch_tokens
    with pytest.raises(SettingError, match="recurrent layers"):
        ContextShift.requested("shift", 4, tested)
    tested.close()


def test_ring_and_checkpoint_rows_equal_the_written_ones() -> None:
    rows = RecentRows.allocate(1000, 2, 4)
    assert rows.nbytes == 4 * 4 * rows_for(1000, 2)
    values = np.arange(700)[:, None] * np.ones((1, 4), np.float32)
    rows.write(0, values[:500])
    rows.write(500, values[500:])
    np.testing.assert_array_equal(rows.before(700)[:, 0], [698, 699])
    rows.restore_checkpoint(2 * CHECKPOINT_POSITIONS)
    np.testing.assert_array_equal(rows.before(512)[:, 0], [510, 511])
    np.testing.assert_array_equal(rows.before(1)[:, 0], [0, rows.ring[0, 0, 0]])


def test_positions_outside_the_ring_are_rewound_to_a_checkpoint() -> None:
    limit = RewindLimit(2)
    assert limit.rewind(700 - 20, 700) == (680, False)
    assert limit.rewind(700 - RING_ROWS, 700) == (512, True)
    assert limit.rewind(512, 515) == (512, False)
    assert limit.rewind(511, 515) == (256, True)
    assert limit.rewind(0, 515) == (0, False)
    assert limit.rewind(300, None) == (256, True)
    assert RewindLimit(0).rewind(3, 700) == (3, False)
