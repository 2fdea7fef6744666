"""RoPE frequencies by hand: unscaled, linear, Llama 3 factors, YaRN, LongRoPE by the context in use."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.config_reader import config_from_metadata
from edgeinfer.model_config.rope_scaling import RopeScaling, rope_specification, yarn_magnitude, yarn_ramp
from edgeinfer.model_config.weights import read_config, rope_factors
from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_quant_formats import GGUFFile
from tests.model_zoo import ZOO
from tests.random_models import RandomModel

PLAIN = (1.0, 10000**-0.25, 0.01, 10000**-0.75)
"""Four frequencies of base 10000: 1, 1/10, 1/100, 1/1000."""


def frequencies(scaling: RopeScaling, factors: list[float] | None = None) -> tuple[float, ...]:
    given = None if factors is None else np.array(factors, np.float32)
    return rope_specification(8, 10000.0, True, scaling, given).inverse_frequencies


def test_unscaled_frequencies_decrease_from_one() -> None:
    assert frequencies(RopeScaling()) == pytest.approx((1.0, 0.1, 0.01, 0.001))
    assert frequencies(RopeScaling()) == pytest.approx(PLAIN)


def test_linear_scaling_divides_them_all() -> None:
    assert frequencies(RopeScaling("linear", 4.0)) == pytest.approx((0.25, 0.025, 0.0025, 0.00025))


def test_scaling_type_none_ignores_the_factor() -> None:
    metadata = RandomModel(
        "llama", extra={"rope.scaling.type": "none", "rope.scaling.factor": 4.0}
    ).metadata()
    config = config_from_metadata(metadata, 288)
    assert config.rope_scaling.factor == 1.0


def test_the_old_name_of_the_linear_factor_is_parsed() -> None:
    metadata = RandomModel("llama", extra={"rope.scale_linear": 4.0}).metadata()
    scaling = config_from_metadata(metadata, 288).rope_scaling
    assert (scaling.kind, scaling.factor) == ("linear", 4.0)


def test_factors_of_the_file_divide_each_frequency() -> None:
    assert frequencies(RopeScaling(), [1, 2, 4, 8]) == pytest.approx((1.0, 0.05, 0.0025, 0.000125))


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones() -> None:
    # Frequency i has c/(2π·base^(2i/d)) periods in a context of c; with c = 2π·1000 that is 1000, 100, 10, 1:
    # 32 periods are at index 1.49 (floor 1), 1 period at index 3.
    scaling = RopeScaling("yarn", 4.0, original_context=round(2 * math.pi * 1000))
    assert yarn_ramp(8, 10000.0, scaling) == pytest.approx([1, 1, 0.5, 0], abs=1e-3)
    actual = rope_specification(8, 10000.0, True, scaling, None)
    assert actual.inverse_frequencies == pytest.approx((1.0, 0.1, 0.01 * (0.5 + 0.5 / 4), 0.00025), rel=1e-3)
    assert actual.magnitude == pytest.approx(1 + 0.1 * math.log(4))


def test_yarn_without_extrapolation_is_linear() -> None:
    scaling = RopeScaling("yarn", 4.0, original_context=6283, extrapolation=0.0)
    assert frequencies(scaling) == pytest.approx((0.25, 0.025, 0.0025, 0.00025))


def test_the_yarn_magnitude_has_a_log_multiplier_and_an_attention_factor() -> None:
    assert yarn_magnitude(RopeScaling("yarn", 1.0)) == 1.0
    with_multiplier = RopeScaling("yarn", 40.0, log_multiplier=0.5)
    assert yarn_magnitude(with_multiplier) == pytest.approx(
        (1 + 0.1 * math.log(40)) / (1 + 0.05 * math.log(40))
    )
    scaling = RopeScaling("yarn", 4.0, original_context=6283, attention_factor=2.0)
    magnitude = rope_specification(8, 10000.0, True, scaling, None).magnitude
    assert magnitude == pytest.approx(2 * (1 + 0.1 * math.log(4)))


@pytest.mark.parametrize(("context", "limit"), [(64, 2.0), (65, 40.0)])
def test_longrope_uses_its_short_factors_up_to_the_original_context(
    tmp_path: Path, context: int, limit: float
) -> None:
    with GGUFFile.open(ZOO["phi3-longrope"].write(tmp_path / "model.gguf")) as file:
        config = read_config(file)
        factors = rope_factors(file, config, context)
        assert factors is not None
        assert factors[-1] == limit
        rope = config.specification(factors).layers[0].block_of(AttentionSpec).rope
    assert rope is not None
    assert rope.magnitude == pytest.approx(1.19)
    assert rope.inverse_frequencies[-1] == pytest.approx(10000 ** (-14 / 16) / limit)


@pytest.mark.parametrize(
    ("factors", "text"),
    [
        ([1.0] * 7, "rope_freqs.weight: 7 factors, wanted 8"),
        ([1.0] * 7 + [0.0], "rope_freqs.weight: a factor of 0.0, wanted finite numbers above 0"),
        ([math.nan] * 8, "rope_freqs.weight: a factor of nan, wanted finite numbers above 0"),
    ],
)
def test_invalid_factors_are_refused(tmp_path: Path, factors: list[float], text: str) -> None:
    model = replace(ZOO["llama"], rope_tensors={"rope_freqs.weight": np.array(factors, np.float32)})
    with GGUFFile.open(model.write(tmp_path / "model.gguf")) as file:
        config = read_config(file)
        with pytest.raises(UnsupportedModelError) as caught:
            rope_factors(file, config, 64)
    assert str(caught.value) == text


def test_windowed_layers_of_gemma3_have_a_separate_base_and_no_scaling() -> None:
    config = config_from_metadata(ZOO["gemma3"].metadata(), 288)
    layers = config.specification().layers
    windowed, full = layers[0].block_of(AttentionSpec).rope, layers[5].block_of(AttentionSpec).rope
    assert windowed is not None
    assert full is not None
    assert windowed.inverse_frequencies[1] == pytest.approx(10000 ** (-2 / 32))
    assert full.inverse_frequencies[1] == pytest.approx(1000000 ** (-2 / 32) / 8)
