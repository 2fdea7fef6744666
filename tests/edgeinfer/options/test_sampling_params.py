"""An option out of range is refused with its name, its value and the range."""

import math
from typing import Any

import pytest

from edgeinfer.errors import EdgeInferError, SettingError
from edgeinfer.sampling import Sampler, SamplingParams


def test_the_defaults_are_those_of_llama_cpp() -> None:
    settings = SamplingParams()
    assert (settings.temperature, settings.top_k, settings.top_p, settings.min_p) == (0.8, 40, 0.95, 0.05)
    assert (settings.typical_p, settings.repeat_penalty, settings.mirostat) == (1.0, 1.0, 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -0.5}, "temperature: saw -0.5, wanted a number of at least 0"),
        ({"temperature": math.nan}, "temperature: saw nan, wanted a number of at least 0"),
        ({"temperature": "hot"}, "temperature: saw 'hot', wanted a number of at least 0"),
        ({"top_k": -1}, "top_k: saw -1, wanted a whole number of at least 0"),
        ({"top_k": 3.5}, "top_k: saw 3.5, wanted a whole number of at least 0"),
        ({"top_k": True}, "top_k: saw True, wanted a whole number of at least 0"),
        ({"top_p": 1.5}, "top_p: saw 1.5, wanted a number from 0 to 1"),
        ({"min_p": -0.1}, "min_p: saw -0.1, wanted a number from 0 to 1"),
        ({"typical_p": 2}, "typical_p: saw 2, wanted a number from 0 to 1"),
        ({"repeat_penalty": 0}, "repeat_penalty: saw 0, wanted a number above 0"),
        ({"repeat_last_n": -2}, "repeat_last_n: saw -2, wanted a whole number of at least -1"),
        ({"presence_penalty": math.inf}, "presence_penalty: saw inf, wanted a finite number"),
        ({"dry_base": 0.5}, "dry_base: saw 0.5, wanted a number of at least 1"),
        ({"dry_allowed_length": 0}, "dry_allowed_length: saw 0, wanted a whole number of at least 1"),
        ({"xtc_probability": 1.01}, "xtc_probability: saw 1.01, wanted a number from 0 to 1"),
        ({"mirostat": 1}, "mirostat: saw 1, wanted one of 0, 2"),
        ({"mirostat_tau": 0}, "mirostat_tau: saw 0, wanted a number above 0"),
        ({"seed": -1}, "seed: saw -1, wanted a whole number of at least 0, or None"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias: saw token id -1, wanted a whole number of at least 0"),
        ({"logit_bias": {7: math.nan}}, "logit_bias: saw nan for token 7, wanted a finite number or -inf"),
        ({"logit_bias": {7: math.inf}}, "logit_bias: saw inf for token 7, wanted a finite number or -inf"),
        ({"logit_bias": [7]}, "logit_bias: saw [7], wanted token ids and biases, as {5: -1.0}"),
        ({"logit_bias": None}, "logit_bias: saw None, wanted token ids and biases, as {5: -1.0}"),
        ({"dry_sequence_breakers": None}, "dry_sequence_breakers: saw None, wanted a tuple of texts"),
        ({"dry_sequence_breakers": ("",)}, "dry_sequence_breakers: saw '', wanted text that isn't empty"),
        (
            {"dry_sequence_breakers": "\n"},
            "dry_sequence_breakers: saw the text '\\n', wanted a tuple of texts",
        ),
    ],
)
def test_a_value_outside_its_range_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as caught:
        SamplingParams(**given)
    assert str(caught.value) == message


def test_a_misspelled_option_suggests_the_nearest() -> None:
    with pytest.raises(EdgeInferError, match=r"^temprature: no such option; did you mean temperature\?$"):
        SamplingParams.from_keywords({"temprature": 1.0})
    with pytest.raises(EdgeInferError, match=r"^zzz: no such option; known are seed, logit_bias"):
        SamplingParams.from_keywords({"zzz": 1.0})


def test_a_bias_beyond_the_vocabulary_is_an_error() -> None:
    with pytest.raises(SettingError, match=r"^logit_bias: saw token id 8, wanted 0 to 7$"):
        Sampler(SamplingParams(logit_bias={8: 1.0}), 8)
