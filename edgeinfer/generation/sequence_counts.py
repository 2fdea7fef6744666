"""Number and kind of requested completions: sampled, best of several, or beam search."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgeinfer.errors import SettingError, shown
from edgeinfer.generation.request import Request
from edgeinfer.options.option_field import plain_number
from edgeinfer.options.run_options import COUNTS
from edgeinfer.results import Generation
from edgeinfer.structured.constraint import Constraint

MAX_COMPLETIONS = 256


@dataclass(frozen=True)
class SequenceCounts:
    """`n` completions are returned, None: one; of `best_of` sampled ones, or of `beams` in a beam search."""

    n: int | None = None
    best_of: int | None = None
    beams: int | None = None

    def __post_init__(self) -> None:
        for name in ("n", "best_of", "beams"):
            value = plain_number(getattr(self, name))
            object.__setattr__(self, name, value)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (whole and 1 <= value <= MAX_COMPLETIONS):
                expected = f"a whole number from 1 to {MAX_COMPLETIONS}"
                raise SettingError(f"{name}: saw {shown(value)}, wanted {expected}")
        if self.best_of is not None and self.beams is not None:
            raise SettingError(
                "best_of and beams: sampling and beam search exclude each other; leave one out"
            )
        for name in ("best_of", "beams"):
            count = getattr(self, name)
            if count is not None and count < (self.n or 1):
                raise SettingError(f"{name}: saw {count}, wanted at least the {self.n} completions of n")

    def completions(
        self,
        request: Request,
        constraint: Callable[[], Constraint | None],
        run: Callable[[Sequence[Request]], list[Generation]],
        search: Callable[[Request, int], list[Generation]],
    ) -> list[Generation]:
        """`n` completions of a prompt. Completion 0 equals that of a stream; seeds are consecutive if one is
        given.

        `constraint` returns a new constraint for each; `run` completes requests together; `search` is a beam
        search. Raises `SettingError`: the options exclude each other.
        """
        requested = self.n or 1
        if self.beams is not None:
            if request.context_shift is not None:
                raise SettingError(
                    "context_overflow: beam search supports 'stop' only; leave it out, or beams"
                )
            if request.stop:
                raise SettingError("stop: a beam ends where the model ends it; leave stop or beams out")
            if request.constraint is not None:
                raise SettingError(
                    "schema and grammar: beam search doesn't support them; leave these out, or beams"
                )
            return search(request, self.beams)[:requested]
        if self.best_of is None:
            return run(self._requests(request, requested, constraint))
        with_logprobs = replace(request, logprobs=request.logprobs or 0)
        return best_completions(run(self._requests(with_logprobs, self.best_of, constraint)), requested)

    @staticmethod
    def _requests(request: Request, count: int, constraint: Callable[[], Constraint | None]) -> list[Request]:
        seed = request.sampling.seed
        seeds = [None if seed is None else seed + index for index in range(count)]
        return [
            replace(request, sampling=replace(request.sampling, seed=each), constraint=constraint())
            for each in seeds
        ]


def one_completion(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for several prompts. Raises `SettingError`: there is a number of completions."""
    for name in COUNTS:
        if options.get(name) is not None:
            raise SettingError(
                f"{name}: saw {shown(options[name])}, but each of several prompts gets one completion; give "
                "one prompt, or leave it out"
            )
    return {name: value for name, value in options.items() if name not in COUNTS}


def best_completions(completions: Sequence[Generation], count: int) -> list[Generation]:
    """The `count` completions with the highest mean log-probability per token, best first."""
    worst = -math.inf
    ranked = sorted(
        completions, key=lambda g: worst if g.mean_logprob is None else g.mean_logprob, reverse=True
    )
    return ranked[:count]
