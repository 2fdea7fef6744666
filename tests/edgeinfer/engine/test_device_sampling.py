"""Tokens sampled on a device are those that the host samples, from the same probabilities."""

from collections.abc import Sequence

import numpy as np
import pytest

from edgeinfer.engine.device_sampling import DeviceSampler
from edgeinfer.engine.kv_cache import KVCache
from edgeinfer.sampling import Sampler, SamplingParams
from edgeinfer_kernels.backend import SamplingSettings
from edgeinfer_kernels.capabilities import Capabilities
from edgeinfer_kernels.reference import ReferenceBackend

VOCABULARY = 50


def logits_behind(token_id: int, position: int) -> np.ndarray:
    random = np.random.default_rng([token_id, position])
    return random.standard_normal(VOCABULARY).astype(np.float32)


class FakeBackend(ReferenceBackend):
    """Samples like the host; refuses at the positions in `refused`."""

    capabilities = Capabilities(sampling_history=8)

    def __init__(self, settings: SamplingParams, refused: Sequence[int] = ()) -> None:
        self.sampler = Sampler(settings, VOCABULARY)
        self.refused = refused
        self.recents: list[int] = []
        self.rooms: list[bool] = []

    def sampling_request(self, settings: SamplingSettings, recent: int, uniform: float) -> list[float]:
        return [uniform, recent]

    def sample_next(
        self,
        token_id: int,
        start: int,
        request: Sequence[float] | None = None,
        recent: Sequence[int] = (),
        next_request: Sequence[float] | None = None,
        may_run_ahead: bool = True,
    ) -> int:
        self.recents.append(len(recent))
        self.rooms.append(may_run_ahead)
        if start in self.refused:
            return -1
        ids, probs = self.sampler.distribution(logits_behind(token_id, start), recent)
        index = np.searchsorted(np.cumsum(probs), request[0], side="right") if request else 0
        return int(ids[min(int(index), len(ids) - 1)])


def tokens_of(settings: SamplingParams, refused: Sequence[int], on_device: bool) -> list[int]:
    sampler, cache, history = Sampler(settings, VOCABULARY), KVCache(64), [1]
    item = DeviceSampler.offered(FakeBackend(settings, refused), cache, sampler) if on_device else None
    assert (item is not None) == on_device
    for position in range(30):
        selected = item.next(history) if item else None
        if selected is None:
            cache.append(history[-1:])
            selected = sampler.sample(logits_behind(history[-1], position), history)
        history.append(selected)
    assert len(cache.ids) == 30
    return history


@pytest.mark.parametrize("refused", [(), (3, 4, 17)])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_device_sampling_continues_the_host_sequence(temperature: float, refused: Sequence[int]) -> None:
    settings = SamplingParams(temperature=temperature, seed=7)
    assert tokens_of(settings, refused, True) == tokens_of(settings, refused, False)


def test_peeked_uniforms_are_consumed_later() -> None:
    settings = SamplingParams(seed=3)
    expected = [Sampler(settings, VOCABULARY).peek_uniform(index) for index in range(4)]
    sampler = Sampler(settings, VOCABULARY)
    assert [sampler.peek_uniform(1), sampler.peek_uniform(0), sampler.uniform()] == [
        expected[1],
        expected[0],
        expected[0],
    ]
    state = sampler.snapshot()
    for _ in range(2):
        assert [sampler.uniform() for _ in range(3)] == expected[1:]
        sampler.restore(state)


@pytest.mark.parametrize("ahead", [True, False])
def test_no_step_is_queued_ahead_if_a_draft_may_intervene(ahead: bool) -> None:
    settings = SamplingParams(temperature=0.0)
    backend = FakeBackend(settings)
    item = DeviceSampler.offered(backend, KVCache(64), Sampler(settings, VOCABULARY))
    assert item is not None
    item.next([1], ahead)
    assert backend.rooms == [ahead]


@pytest.mark.parametrize(
    "settings",
    [
        SamplingParams(top_n_sigma=1.0),
        SamplingParams(typical_p=0.9),
        SamplingParams(mirostat=2),
        SamplingParams(dry_multiplier=0.5),
        SamplingParams(xtc_probability=0.5),
        SamplingParams(logit_bias={3: 1.0}),
        SamplingParams(repeat_penalty=1.1, repeat_last_n=-1),
        SamplingParams(repeat_penalty=1.1, repeat_last_n=9),
        SamplingParams(repeat_penalty=1.1, repeat_last_n=4, temperature=0.0),
    ],
)
def test_unsupported_samplers_run_on_the_host(settings: SamplingParams) -> None:
    backend, sampler = FakeBackend(settings), Sampler(settings, VOCABULARY)
    assert DeviceSampler.offered(backend, KVCache(8), sampler) is None


def test_penalties_receive_the_last_tokens_only() -> None:
    settings = SamplingParams(repeat_penalty=1.1, repeat_last_n=4, seed=1)
    backend = FakeBackend(settings)
    item = DeviceSampler.offered(backend, KVCache(64), Sampler(settings, VOCABULARY))
    assert item is not None
    for length in (1, 3, 6):
        item.next(list(range(length)))
    assert backend.recents == [1, 3, 4]


def test_a_backend_without_sampling_has_no_device_sampler() -> None:
    settings = SamplingParams()
    backend = FakeBackend(settings)
    backend.capabilities = Capabilities()
    assert DeviceSampler.offered(backend, KVCache(8), Sampler(settings, VOCABULARY)) is None
