"""Choosing tokens where the logits lie: the part of a sampler's chain that a GPU does by itself."""

from collections.abc import Sequence
from typing import Protocol, Self

from edgeinfer.engine.device_failures import DEVICE_FAILURES
from edgeinfer.engine.kv_cache import KVCache
from edgeinfer.sampling import Sampler, SamplerSettings
from edgeinfer.sampling.penalties import last_tokens, penalties_are_on


class SamplingBackend(Protocol):
    """What a backend that samples by itself offers; see `CudaBackend.choose`."""

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
        """The numbers of one draw, as `choose` takes them."""
        ...


class DeviceSampler:
    """Tokens of one stream, chosen by the backend as `sampler` would choose them, with the same numbers."""

    def __init__(self, backend: SamplingBackend, cache: KVCache, sampler: Sampler) -> None:
        self._backend = backend
        self._cache = cache
        self._sampler = sampler
        self._settings = sampler.settings

    @classmethod
    def offered(cls, backend: object, cache: KVCache, sampler: Sampler) -> Self | None:
        """None where the backend can't choose, or not with these settings."""
        most_recent = getattr(backend, "most_recent", None)
        if most_recent is None or not _is_plain(sampler.settings, most_recent):
            return None
        return cls(backend, cache, sampler)  # type: ignore[arg-type]

    def next(self, history: Sequence[int], ahead: bool = True) -> int | None:
        """Read the last token of `history`, all others of which are in the cache; the id that follows it.

        None: the host has to sample this one; the token has not been read then. `ahead`: the backend may
        begin with the next one, which it will be asked for.
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
    """Whether the device knows all steps of the chain that are on."""
    others = (
        settings.typical_p < 1,
        settings.dry_multiplier > 0,
        settings.xtc_probability > 0,
        settings.mirostat != 0,
        bool(settings.logit_bias),
    )
    penalized = penalties_are_on(settings)
    # At temperature 0 without penalties the highest logit is taken; with them, it goes through a draw.
    too_many = penalized and not 0 <= settings.repeat_last_n <= most_recent
    return not any(others) and not too_many and not (penalized and settings.temperature == 0)
