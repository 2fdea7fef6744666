"""A step of one token of each of several states: bit for bit what each gives alone."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.decoder_state import DecoderState
from tests.kernels.conftest import ISAS
from tests.kernels.cpu.test_batch_positions import build_for
from tests.kernels.cpu.test_cpu_backend import Build, cpu, engine_for, exact, relative
from tests.model_zoo import ZOO
from tests.random_models import VOCABULARY

CONTEXT = 1400
RANDOM = np.random.default_rng(5)
PROMPTS = [RANDOM.integers(3, VOCABULARY, length).tolist() for length in (5, 1250, 40)]
"""The second one is longer than the rings."""
TAIL = RANDOM.integers(3, VOCABULARY, 12).tolist()
HYBRID = ["lfm2", "qwen35", "kimi-linear", "granitehybrid-moe", "nemotron_h", "jamba", "mamba", "rwkv7"]
RINGS = ["gemma3", "gpt-oss", "gemma3n", "olmo2-windows"]


def joined_engine(path: Path, build: Build, kind: CacheType = "f32") -> NativeEngine:
    """An engine with a state for each prompt."""
    first = engine_for(path, build, kind, context=CONTEXT)
    pool = DecoderState.allocate(first.specification, CONTEXT, kind).pooled(len(PROMPTS))
    engine = first.with_state(pool.states[0])
    engine.join(pool)
    return engine


def together(engine: NativeEngine) -> npt.NDArray[np.float32]:
    """(prompts, tail, vocabulary): the logits after each token of the tail, with a changing order of rows."""
    engines = (engine, *engine.others)
    for each, prompt in zip(engines, PROMPTS, strict=True):
        each.append(prompt)
    logits = np.full((len(PROMPTS), len(TAIL), VOCABULARY), np.nan, np.float32)
    for index, token in enumerate(TAIL):
        order = np.roll(np.arange(len(PROMPTS)), index).tolist()
        x = engine.append_each([engines[state] for state in order], [token] * len(order))
        logits[order, index] = engine.logits(x)
    return logits


def one_by_one(path: Path, build: Build, kind: CacheType = "f32") -> npt.NDArray[np.float32]:
    """The same of each prompt on its own engine."""
    rows = []
    for prompt in PROMPTS:
        engine = engine_for(path, build, kind, context=CONTEXT)
        engine.append(prompt)
        rows.append([engine.append([token]) for token in TAIL])
        engine.close()
    return np.array(rows)


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("model", [*HYBRID, *RINGS])
@pytest.mark.parametrize("kind", ["f32", "q4_0"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_step_of_several_states_equals_each_alone_bit_for_bit(
    tmp_path: Path, model: str, kind: CacheType, threads: int
) -> None:
    path, build = ZOO[model].write(tmp_path / "model.gguf"), cpu(threads=threads)
    engine = joined_engine(path, build, kind)
    np.testing.assert_array_equal(together(engine), one_by_one(path, build, kind))


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("isa", ["reference", *ISAS])
@pytest.mark.parametrize("model", ["lfm2", "qwen35", "gemma3"])
def test_a_step_of_several_states_equals_the_reference(tmp_path: Path, isa: str, model: str) -> None:
    path = ZOO[model].write(tmp_path / "model.gguf")
    actual, expected = together(joined_engine(path, build_for(isa, 2))), one_by_one(path, exact)
    for got, wanted in zip(actual, expected, strict=True):
        assert relative(got, wanted) < 5e-6


def test_a_state_with_positions_after_its_slot_takes_its_step_alone(tmp_path: Path) -> None:
    engine = joined_engine(ZOO["lfm2"].write(tmp_path / "model.gguf"), cpu())
    other = engine.others[0]
    for each in (engine, other):
        each.append(PROMPTS[0])
        each.append(TAIL[:4])
    assert engine.can_join
    engine.rewind(len(PROMPTS[0]) + 2)
    assert not engine.can_join
    with pytest.raises(ValueError, match="saw 2 positions after its slot, wanted none"):
        engine.append_each([other, engine], TAIL[:2])
    engine.append(TAIL[2:3])
    assert engine.can_join


def test_a_full_context_takes_no_step(tmp_path: Path) -> None:
    engine = joined_engine(ZOO["gemma3"].write(tmp_path / "model.gguf"), cpu())
    engine.append([*PROMPTS[1], *PROMPTS[1][: CONTEXT - len(PROMPTS[1])]])
    assert not engine.can_join
    assert engine.others[0].can_join
