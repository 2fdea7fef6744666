"""DRY's penalties on random histories, against llama.cpp's sampler over the built-in model's vocabulary."""

import ctypes
import random
from collections.abc import Iterator
from typing import Any

import pytest

from edgeinfer.registry.registry import find_model
from edgeinfer.sampling import SamplingParams
from edgeinfer.sampling.dry import SequenceBreakers, dry_penalties

llama_cpp = pytest.importorskip("llama_cpp")
pytestmark = [
    pytest.mark.llama_cpp,
    pytest.mark.skipif(
        len(llama_cpp.llama_sampler_init_dry.argtypes) != 7,
        reason="a release with another llama_sampler_init_dry",
    ),
]


@pytest.fixture(scope="module")
def vocabulary() -> Iterator[Any]:
    parameters = llama_cpp.llama_model_default_params()
    parameters.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(find_model("tiny").path).encode(), parameters)
    yield llama_cpp.llama_model_get_vocab(model)
    llama_cpp.llama_model_free(model)


def theirs(vocabulary: Any, history: list[int], settings: SamplingParams) -> dict[int, float]:
    size = llama_cpp.llama_vocab_n_tokens(vocabulary)
    breakers = [text.encode() for text in settings.dry_sequence_breakers]
    sampler = llama_cpp.llama_sampler_init_dry(
        vocabulary,
        settings.dry_multiplier,
        settings.dry_base,
        settings.dry_allowed_length,
        settings.dry_penalty_last_n,
        (ctypes.c_char_p * len(breakers))(*breakers),
        len(breakers),
    )
    data = (llama_cpp.llama_token_data * size)(
        *(llama_cpp.llama_token_data(i, 0.0, 0.0) for i in range(size))
    )
    array = llama_cpp.llama_token_data_array(data, size, -1, False)
    for token_id in history:
        llama_cpp.llama_sampler_accept(sampler, token_id)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    llama_cpp.llama_sampler_free(sampler)
    return {item.id: -item.logit for item in array.data[:size] if item.logit}


@pytest.mark.slow
def test_penalties_agree_on_random_histories(vocabulary: Any) -> None:
    size = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def token_bytes(token_id: int) -> bytes:
        buffer = ctypes.create_string_buffer(256)
        length = llama_cpp.llama_token_to_piece(vocabulary, token_id, buffer, 256, 0, True)
        return buffer.raw[:length]

    breaking = [token_id for token_id in range(size) if token_bytes(token_id) == b"\n"]
    assert len(breaking) == 1
    rng = random.Random(1)
    penalized = 0
    for trial in range(80):
        alphabet = [rng.randrange(5, size) for _ in range(2 + trial % 3)] + breaking * (trial % 2)
        history = [rng.choice(alphabet) for _ in range(rng.randrange(60))]
        settings = SamplingParams(
            dry_multiplier=rng.choice([0.5, 1.0]),
            dry_base=rng.choice([1.0, 1.2, 1.75]),
            dry_allowed_length=rng.choice([1, 2, 3]),
            dry_penalty_last_n=rng.choice([5, 20, 64]),
        )
        expected = theirs(vocabulary, history, settings)
        breakers = SequenceBreakers(settings.dry_sequence_breakers, token_bytes)
        assert dry_penalties(history, settings, breakers) == pytest.approx(expected, rel=1e-4)
        penalized += bool(expected)
    assert penalized > 20
