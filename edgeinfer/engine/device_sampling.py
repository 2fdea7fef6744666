"""Sampling on the GPU: the part of the sampler chain that runs where the logits are."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from edgeinfer.engine.guards import DEVICE_FAILURES
from edgeinfer.engine.kv_cache import KVCache
from edgeinfer.sampling import Sampler, SamplingParams
from edgeinfer.sampling.chain import active_steps
from edgeinfer.sampling.penalties import last_tokens, penalties_are_on
from edgeinfer_kernels.backend import Backend, BatchPositions, HiddenStates


class DeviceSampler:
    """Samples the tokens of one stream on the backend, with the same results and uniforms as `sampler`."""

    def __init__(
        self,
        backend: Backend[Any],
        cache: KVCache,
        sampler: Sampler,
        processed: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self._backend = backend
        self._cache = cache
        self._sampler = sampler
        self._processed = processed or cache.append
        self._params = sampler.settings

    @classmethod
    def offered(
        cls,
        backend: Backend[Any],
        cache: KVCache,
        sampler: Sampler,
        processed: Callable[[Sequence[int]], None] | None = None,
    ) -> Self | None:
        """The device sampler; None if the backend can't sample, or not with these params. `processed`: called
        with the tokens that the cache holds after a step; by default they are appended to it.
        """
        if not samples_on(backend, sampler):
            return None
        return cls(backend, cache, sampler, processed)

    def next(self, history: Sequence[int], ahead: bool = True) -> int | None:
        """Process the last token of `history`; the others are already in the cache. Returns the next id.

        None: the host has to sample this one; the token isn't processed then. `ahead`: the backend may start
        the following token, which will be requested next.
        """
        params, start = self._params, len(history) - 1
        recent = penalized(self._sampler, history)
        request = following = None
        if params.temperature > 0:
            request = _request(self._backend, self._sampler, len(recent))
            following = _request(self._backend, self._sampler, 0, 1)
        room = ahead and start + 2 < self._cache.context
        self._cache.reserve(start + 2)
        with DEVICE_FAILURES:
            sampled = self._backend.sample_next(history[-1], start, request, recent, following, room)
        if sampled < 0:
            return None
        self._processed(history[-1:])
        if params.temperature > 0:
            self._sampler.uniform()
        return sampled


class BatchSampling:
    """Samples the next tokens of several sequences after one step, on a backend that can."""

    def __init__(self, backend: Backend[Any]) -> None:
        self._backend = backend
        self._history_size = backend.capabilities.sampling_history

    def sample(
        self,
        x: HiddenStates,
        rows: Mapping[int, tuple[Sampler, Sequence[int]]],
        following: BatchPositions | None = None,
    ) -> dict[int, int]:
        """The ids sampled for some rows of a batch, as their sampler would; `rows`: the sampler and the ids
        so far. Rows whose sampling parameters the device doesn't support are left out; without such rows the
        device may continue with the `following` step.
        """
        if self._history_size is None:
            return {}
        size = self._history_size
        supported = {row: pair for row, pair in rows.items() if _is_supported(pair[0].settings, size)}
        if not supported:
            return {}
        requests: list[Sequence[float]] = [self._unused] * len(x)
        recent: list[Sequence[int]] = [()] * len(x)
        for row, (sampler, history) in supported.items():
            recent[row] = penalized(sampler, history)
            requests[row] = _request(self._backend, sampler, len(recent[row]))
        with DEVICE_FAILURES:
            every = following if len(supported) == len(x) else None
            sampled = self._backend.sample_batch(x, requests, recent, every)
        taken = {row: sampled[row] for row in supported if sampled[row] >= 0}
        for row in taken:
            sampler = supported[row][0]
            if sampler.settings.temperature > 0:
                sampler.uniform()
        return taken

    @property
    def _unused(self) -> list[float]:
        """The request of a row whose sample isn't read."""
        return self._backend.sampling_request(SamplingParams(temperature=0.0), 0, 0.0)


def sample_after_each(
    backend: Backend[Any],
    x: HiddenStates,
    before: Sequence[int],
    paths: Sequence[Sequence[int]],
    sampler: Sampler,
) -> list[int]:
    """The tokens that `sampler` would sample after the tokens of the last step, -1 where the host has to.
    `before`: the tokens before the step that are `penalized`; `paths`: the tokens of the step that end with
    each of them. `samples_on` has to be true.
    """
    recent = [penalized(sampler, [*before, *path]) for path in paths]
    requests = [
        _request(backend, sampler, len(ids), len(path) - 1) for ids, path in zip(recent, paths, strict=True)
    ]
    with DEVICE_FAILURES:
        return backend.sample_batch(x, requests, recent)


def expected_requests(backend: Backend[Any], sampler: Sampler, count: int) -> Sequence[Sequence[float]]:
    """The requests of the next `count` tokens of `sampler`, as `sample_after_each` makes them; empty if they
    depend on the tokens.
    """
    if penalties_are_on(sampler.settings):
        return ()
    return [_request(backend, sampler, 0, index) for index in range(count)]


def samples_on(backend: Backend[Any], sampler: Sampler) -> bool:
    """Whether the backend samples with these parameters."""
    history_size = backend.capabilities.sampling_history
    return history_size is not None and _is_supported(sampler.settings, history_size)


def penalized(sampler: Sampler, history: Sequence[int]) -> Sequence[int]:
    """The recent tokens that get penalties."""
    params = sampler.settings
    return last_tokens(history, params.repeat_last_n) if penalties_are_on(params) else ()


def _request(backend: Backend[Any], sampler: Sampler, recent: int, ahead: int = 0) -> Sequence[float]:
    """The sampling request of a token, with `recent` penalized ones, after `ahead` further samples."""
    params = sampler.settings
    uniform = sampler.peek_uniform(ahead) if params.temperature > 0 else 0.0
    return backend.sampling_request(params, recent, uniform)


def _is_supported(params: SamplingParams, history_size: int) -> bool:
    """Whether the device implements all active steps of the sampler chain."""
    if penalties_are_on(params) and not (
        params.temperature > 0 and 0 <= params.repeat_last_n <= history_size
    ):
        return False  # the device's argmax ignores penalties, its sampler applies them to `history_size` ids
    return all(step.on_device for step in active_steps(params))
