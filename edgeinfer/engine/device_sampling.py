"""Sampling on the GPU: the part of the sampler chain that runs where the logits are."""

from collections.abc import Sequence
from typing import Protocol, Self

from edgeinfer.engine.device_failures import DEVICE_FAILURES
from edgeinfer.engine.kv_cache import KVCache
from edgeinfer.sampling import Sampler, SamplerSettings
from edgeinfer.sampling.penalties import last_tokens, penalties_are_on


class SamplingBackend(Protocol):
    """A backend that can sample; see `CudaBackend.choose`."""

    most_recent: int

    def choose(
        self,
        token_id: int,
        start: int,
        draw: Sequence[float] | None = None,
        recent: Sequence[int] = (),
        following: Sequence[float] | None = None,
        room: bool = True,
    ) -> int: ...

    def draw_request(self, settings: "SamplerSettings", recent: int, chance: float) -> list[float]:
        """The parameters of one sample, as `choose` takes them."""
        ...


class DeviceSampler:
    """Samples the tokens of one stream on the backend, with the same results and uniforms as `sampler`."""

    def __init__(self, backend: SamplingBackend, cache: KVCache, sampler: Sampler) -> None:
        self._backend = backend
        self._cache = cache
        self._sampler = sampler
        self._settings = sampler.settings

    @classmethod
    def offered(cls, backend: object, cache: KVCache, sampler: Sampler) -> Self | None:
        """The device sampler; None if the backend can't sample, or not with these settings."""
        most_recent = getattr(backend, "most_recent", None)
        if most_recent is None or not _is_plain(sampler.settings, most_recent):
            return None
        return cls(backend, cache, sampler)  # type: ignore[arg-type]

    def next(self, history: Sequence[int], ahead: bool = True) -> int | None:
        """Process the last token of `history`; the others are already in the cache. Returns the next id.

        None: the host has to sample this one; the token isn't processed then. `ahead`: the backend may start
        the following token, which will be requested next.
        """
        settings, start = self._settings, len(history) - 1
        recent = last_tokens(history, settings.repeat_last_n) if penalties_are_on(settings) else ()
        draw = following = None
        if settings.temperature > 0:
            draw = self._backend.draw_request(settings, len(recent), self._sampler.coming(0))
            following = self._backend.draw_request(settings, 0, self._sampler.coming(1))
        room = ahead and start + 2 < self._cache.context
        with DEVICE_FAILURES:
            chosen = self._backend.choose(history[-1], start, draw, recent, following, room)
        if chosen < 0:
            return None
        self._cache.append(history[-1:])
        if settings.temperature > 0:
            self._sampler.uniform()
        return chosen


def _is_plain(settings: SamplerSettings, most_recent: int) -> bool:
    """Whether the device implements all active steps of the sampler chain."""
    others = (
        settings.typical_p < 1,
        settings.dry_multiplier > 0,
        settings.xtc_probability > 0,
        settings.mirostat != 0,
        bool(settings.logit_bias),
    )
    penalized = penalties_are_on(settings)
    # At temperature 0 without penalties the highest logit is taken; with penalties the sampling path is used.
    too_many = penalized and not 0 <= settings.repeat_last_n <= most_recent
    return not any(others) and not too_many and not (penalized and settings.temperature == 0)
