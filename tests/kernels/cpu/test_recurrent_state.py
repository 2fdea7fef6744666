"""Recurrent state: steps equal a batch; rewinding and snapshots equal evaluating again."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import SettingError
from edgeinfer.generation.context_shift import ContextShift
from edgeinfer_kernels.blocks.kimi_delta_attention import KimiDeltaAttentionWeights
from edgeinfer_kernels.cpu.backend import CpuBackend
from edgeinfer_kernels.cpu.runtime.abi import RING_ROWS
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.recurrent_state import (
    MAX_CHECKPOINTS,
    MIN_CHECKPOINTS,
    SAVE_POSITIONS,
    WORKING_SLOTS,
    RecurrentShape,
    RecurrentStep,
    StateSlots,
    slots_for,
)
from edgeinfer_kernels.reference import ReferenceBackend
from tests.kernels.cpu.test_cpu_backend import Build, cpu, engine_for, exact, relative
from tests.model_zoo import ZOO
from tests.random_models import VOCABULARY

CONTEXT = 640
IDS = np.random.default_rng(3).integers(3, VOCABULARY, 600).tolist()
SLOW_KINDS = ("kimi-linear", "falcon-h1", "nemotron_h", "mamba", "jamba", "rwkv7")
KINDS = [
    "lfm2",
    "qwen35",
    "mamba2-groups",
    *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_KINDS),
]
TOLERANCE = 1e-5


def engine(tmp_path: Path, build: Build, kind: str) -> NativeEngine:
    return engine_for(ZOO[kind].write(tmp_path / "model.gguf"), build, context=CONTEXT)


def logits_after(tested: NativeEngine, ids: list[int], length: int) -> npt.NDArray[np.float32]:
    """The logits of ids[length:], processed after the first `length`."""
    tested.rewind(length)
    assert tested.ids == ids[:length]
    return tested.append_all(ids[length:])


@pytest.mark.parametrize("hidden", [64, 80])
@pytest.mark.parametrize("taps", [2, 3, 5])
def test_a_short_convolution_equals_the_reference(tmp_path: Path, hidden: int, taps: int) -> None:
    path = replace(ZOO["lfm2"], width=hidden, taps=taps).write(tmp_path / "model.gguf")
    expected = engine_for(path, exact).append_all(IDS[:100])
    tested = engine_for(path, cpu())
    parts = [tested.append_all(IDS[first:last]) for first, last in ((0, 70), (70, 71), (71, 73), (73, 100))]
    tested.close()
    assert relative(np.concatenate(parts), expected) < 5e-6


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("build", [cpu(), exact], ids=["cpu", "reference"])
def test_chunks_of_any_size_equal_one_batch(tmp_path: Path, build: Build, kind: str) -> None:
    tested = engine(tmp_path, build, kind)
    expected = tested.append_all(IDS[:300])
    for size in (1, 63, 64, 65, 200):
        tested.rewind(0)
        parts = [tested.append_all(IDS[first : min(300, first + size)]) for first in range(0, 300, size)]
        assert relative(np.concatenate(parts), expected) < TOLERANCE
    tested.close()


@pytest.mark.default_cases(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [598, 560, 540, 513, 512, 511, 300, 256, 255, 2, 1])
@pytest.mark.parametrize("build", [cpu(), exact], ids=["cpu", "reference"])
def test_a_rewound_state_continues_as_if_later_tokens_were_never_evaluated(
    tmp_path: Path, build: Build, length: int, kind: str
) -> None:
    tested = engine(tmp_path, build, kind)
    expected = tested.append_all(IDS)[length:]
    result = logits_after(tested, IDS, length)
    # The second time, the ring may hold the rows of later positions.
    again = logits_after(tested, IDS, max(1, length - 3))[-len(expected) :]
    tested.close()
    assert relative(result, expected) < TOLERANCE
    assert relative(again, expected) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("build", [cpu(), exact], ids=["cpu", "reference"])
def test_rejected_drafts_evaluate_no_token_again(tmp_path: Path, build: Build, kind: str) -> None:
    """Steps of draft tokens, of which each time some are rejected, between single-token steps."""
    tested = engine(tmp_path, build, kind)
    expected = tested.append_all(IDS[:200])
    tested.rewind(0)
    tested.append(IDS[:40])
    evaluated, end = [], 40
    forward = tested.backend.forward
    tested.backend.forward = lambda x, start: (evaluated.append(len(x)), forward(x, start))[1]  # type: ignore[method-assign,func-returns-value]
    for count, accepted in ((5, 2), (8, 1), (8, 8), (1, 1), (1, 1), (6, 3), (2, 1)) * 4:
        logits = tested.append_all([*IDS[end : end + accepted], *IDS[:count]][:count])
        assert relative(logits[:accepted], expected[end : end + accepted]) < TOLERANCE
        end += accepted
        tested.rewind(end)
    tested.close()
    assert sum(evaluated) <= 31 * 4  # no position was processed by a rewind


@pytest.mark.default_cases(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [600, 599, 550, 512, 400, 100])
def test_snapshot_is_restored_to_any_length(tmp_path: Path, length: int, kind: str) -> None:
    tested = engine(tmp_path, cpu(), kind)
    tested.append(IDS)
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
    assert relative(result, again) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_can_be_evicted(tmp_path: Path, kind: str) -> None:
    tested = engine(tmp_path, cpu(), kind)
    assert not tested.capabilities.max_batch_tokens
    with pytest.raises(SettingError, match="recurrent layers"):
        ContextShift.requested("shift", 4, tested)
    tested.close()


def test_prompts_keep_checkpoints_of_chunks_and_before_the_response(tmp_path: Path) -> None:
    tested = engine(tmp_path, cpu(), "qwen35")
    evaluated: list[int] = []
    forward = tested.backend.forward
    tested.backend.forward = lambda x, start: (evaluated.append(len(x)), forward(x, start))[1]  # type: ignore[method-assign,func-returns-value]
    tested.append(IDS[:500])
    for token in IDS[:100]:
        tested.append([token])
    evaluated.clear()
    tested.rewind(495)
    assert evaluated == [3]
    tested.close()


def test_number_of_slots_follows_from_their_bytes() -> None:
    assert slots_for(1000) == WORKING_SLOTS + MAX_CHECKPOINTS
    assert slots_for(25 << 20) == WORKING_SLOTS + 5
    assert slots_for(1 << 30) == WORKING_SLOTS + MIN_CHECKPOINTS


def test_single_token_steps_leave_a_state_some_positions_back() -> None:
    slots = StateSlots(WORKING_SLOTS + 2)
    slots.begin(0, 100)
    for position in range(100, 400):
        slots.begin(position, 1)
        for distance in range(min(SAVE_POSITIONS, position - 100)):
            other = StateSlots(WORKING_SLOTS + 2)
            other.restore(slots.description())
            assert slots_reach(slots, position + 1 - distance)


def slots_reach(slots: StateSlots, length: int) -> bool:
    """Whether a rewind keeps all of `length` positions."""
    saved = {name: value.copy() if hasattr(value, "copy") else value for name, value in vars(slots).items()}
    length_after = slots.rewind(length)
    vars(slots).update(saved)
    return length_after == length


def test_checkpoints_are_spread_over_the_positions() -> None:
    slots = StateSlots(WORKING_SLOTS + 4)
    for start in range(0, 6400, 100):
        slots.begin(start, 100)
        slots.checkpoint()
    for length in range(0, 6400, 50):
        copy = StateSlots(WORKING_SLOTS + 4)
        copy.restore(slots.description())
        assert length - 6400 / 2 <= copy.rewind(length) <= length


def test_step_reads_one_slot_and_writes_another() -> None:
    slots = StateSlots(WORKING_SLOTS + 2)
    assert slots.begin(0, 5).pending == 0
    step = slots.begin(5, 8)
    assert step.source != step.target
    assert slots.begin(5, 8) is step
    slots.rewind(7)
    again = slots.begin(7, 3)
    assert again == RecurrentStep(2, step.source, again.target)
    assert again.target != step.source


@pytest.mark.parametrize("damaged", [[], [5], [9, 0, 4, 3], [200, 0, 4], [5, 9, 5], [5, 0, *range(1, 30)]])
def test_damaged_description_is_refused(damaged: list[int]) -> None:
    with pytest.raises(ValueError, match="snapshot"):
        StateSlots(WORKING_SLOTS + 2).restore(np.array([damaged], np.int64))


def test_rows_before_position_0_are_zero() -> None:
    state = RecurrentShape(2, 16, 32, 16, 3).allocate()
    state.slots[:] = state.ring[:] = np.nan
    step = RecurrentStep(0, 0, 1)
    np.testing.assert_array_equal(state.before(step, 0), np.zeros((2, 16)))
    np.testing.assert_array_equal(state.matrix(step, 0), np.zeros(16))
    rows = np.arange(3 * 32, dtype=np.float32).reshape(3, 32)
    state.write(step, 0, rows, np.ones(16))
    np.testing.assert_array_equal(state.before(RecurrentStep(0, 1, 2), 3), rows[1:, :16])
    np.testing.assert_array_equal(state.before(RecurrentStep(2, 0, 2), 2)[2:], rows[:2, :16])
    assert state.nbytes == 4 * (RING_ROWS * 32 + 3 * 48)


def with_decays_of_all_strengths(build: Build) -> Build:
    """A backend whose Kimi Delta Attention has decays from e^-1e-6 to e^-300 in every head."""

    def built(s: DecoderSpec, w: DecoderWeights, state: DecoderState) -> CpuBackend | ReferenceBackend:
        for residual in (each for layer in w.layers for each in layer.blocks):
            if isinstance(residual.block, KimiDeltaAttentionWeights):
                random = np.random.default_rng(len(residual.block.dt))
                residual.block.dt[:] = random.uniform(-14, 100, len(residual.block.dt))
                residual.block.a[:] = -3
        return build(s, w, state)

    return built


def test_decays_of_all_strengths_equal_the_reference(tmp_path: Path) -> None:
    path = ZOO["kimi-linear"].write(tmp_path / "model.gguf")
    expected, result = (
        engine_for(path, with_decays_of_all_strengths(build)).append_all(IDS[:100])
        for build in (exact, cpu())
    )
    assert relative(result, expected) < 5e-6
