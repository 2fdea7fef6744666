"""The remaining candidates and their probabilities, against llama.cpp's samplers."""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.sampling import Sampler, SamplingParams

llama_cpp = pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.llama_cpp

VOCABULARY = 3000


def theirs(logits: npt.NDArray[np.float32], history: list[int], settings: SamplingParams) -> dict[int, float]:
    """llama.cpp's default chain up to sampling, id -> probability. DRY needs a model and is omitted."""
    penalties = llama_cpp.llama_sampler_init_penalties
    # Some releases take the size of the vocabulary first.
    size = [VOCABULARY] if len(penalties.argtypes) == 5 else []
    chain = [
        penalties(
            *size,
            settings.repeat_last_n,
            settings.repeat_penalty,
            settings.frequency_penalty,
            settings.presence_penalty,
        ),
        llama_cpp.llama_sampler_init_top_n_sigma(settings.top_n_sigma),
        llama_cpp.llama_sampler_init_top_k(settings.top_k),
        llama_cpp.llama_sampler_init_typical(settings.typical_p, 0),
        llama_cpp.llama_sampler_init_top_p(settings.top_p, 0),
        llama_cpp.llama_sampler_init_min_p(settings.min_p, 0),
        llama_cpp.llama_sampler_init_xtc(settings.xtc_probability, settings.xtc_threshold, 0, 1),
        llama_cpp.llama_sampler_init_temp(settings.temperature),
        llama_cpp.llama_sampler_init_dist(1),
    ]
    data = (llama_cpp.llama_token_data * logits.size)(
        *(llama_cpp.llama_token_data(index, float(logit), 0.0) for index, logit in enumerate(logits))
    )
    array = llama_cpp.llama_token_data_array(data, logits.size, -1, False)
    for sampler in chain:
        for token_id in history:
            llama_cpp.llama_sampler_accept(sampler, token_id)
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
        llama_cpp.llama_sampler_free(sampler)
    result = {array.data[index].id: array.data[index].p for index in range(array.size)}
    return {token_id: probability for token_id, probability in result.items() if probability > 0}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.7},
        {"top_k": 0, "top_p": 0.9, "min_p": 0.0},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.1},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"top_n_sigma": 1.5},
        {"top_n_sigma": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"typical_p": 0.6},
        {"top_k": 0, "typical_p": 0.6, "min_p": 0.02},
        {"repeat_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2, "repeat_last_n": 20},
        {"xtc_probability": 1.0, "xtc_threshold": 0.1},
    ],
)
def test_candidates_and_probabilities_agree(fields: dict[str, Any]) -> None:
    random = np.random.default_rng(9)
    settings = SamplingParams(**fields)
    for spread in (1.0, 4.0):
        logits = (random.standard_normal(VOCABULARY) * spread).astype(np.float32)
        history = [int(token_id) for token_id in np.argsort(-logits)[random.integers(0, 60, 40)]]
        ids, probabilities = Sampler(settings, VOCABULARY).distribution(logits, history)
        expected = theirs(logits, history, settings)
        assert sorted(expected) == ids.tolist()
        requested = np.array([expected[token_id] for token_id in ids])
        np.testing.assert_allclose(probabilities, requested, rtol=2e-4, atol=1e-7)
