"""Counts which neurons a model activates while it reads prompts, and keeps the counts as its profile.

Only counts are kept: no text, no tokens, no activations. A profile that `edgeinfer profile` made is never
changed.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import Activations
from edgeinfer_offload.runtime.activity_profile import (
    EXPERT_NEURONS,
    ActivityProfile,
    Counts,
    ProfileError,
    model_hash,
    profile_paths,
)

RULE = "not exactly zero, counted while reading prompts"
TOKENS_PER_STEP = 16
"""Counted tokens of a step of a prompt: counting all would take a noticeable part of its time."""
MIN_TOKENS = 1024
"""Counted tokens from which on the counts are kept."""
MAX_TOKENS = 1 << 20
"""Counts of more tokens are halved, so that new text keeps its weight."""


class ActivityCounts:
    """The counts of some layers of one model file, in two parts: steps alternate between them."""

    def __init__(self, path: Path, layers: Mapping[int, int], data_folder: Path) -> None:
        """`layers`: the number of experts of each layer, 0 of a dense one."""
        self._path, self._data_folder, self._experts = path, data_folder, layers
        self._counts: dict[str, npt.NDArray[np.int64]] = {}
        self._layers = sorted(layers)
        self._step = 0
        self.tokens = [0, 0]
        """Counted tokens of each part."""

    def observe(self, layer: int, hidden: Activations, experts: npt.NDArray[np.int64] | None = None) -> None:
        """Count the neurons of `hidden` that aren't zero, of some of the tokens: (tokens, neurons), or
        (tokens, experts per token, neurons) of these `experts`.
        """
        if layer not in self._layers:
            return
        step = -(-len(hidden) // TOKENS_PER_STEP)
        rows = hidden[::step]
        if layer == self._layers[0]:
            self._step += 1
            self.tokens[self._step % 2] += len(rows)
        if experts is None:
            counts = self._zeros(f"neurons.{layer}", hidden.shape[1])
            counts[self._step % 2] += np.count_nonzero(rows, axis=0)
            return
        number, neurons = self._experts[layer], hidden.shape[2]
        counts = self._zeros(f"{EXPERT_NEURONS}.{layer}", number * neurons)
        add_in_experts(counts[self._step % 2].reshape(number, neurons), rows, experts[::step])

    def _zeros(self, name: str, granules: int) -> npt.NDArray[np.int64]:
        return self._counts.setdefault(name, np.zeros((2, granules), np.int64))

    def save(self) -> Path | None:
        """Add the counts to the model's profile in the user's data folder; the path, or None: there are too
        few, the profile is another one, or it can't be written.
        """
        if sum(self.tokens) < MIN_TOKENS:
            return None
        with suppress(OSError, ProfileError):
            hashed = model_hash(self._path)
            adjacent, own = profile_paths(self._path, hashed, self._data_folder)
            before = ActivityProfile.load(own) if own.exists() else None
            if adjacent.exists() or (before and (before.model_hash, before.rule) != (hashed, RULE)):
                return None
            own.parent.mkdir(parents=True, exist_ok=True)
            self._added_to(before, hashed).save(own)
            return own
        return None

    def _added_to(self, before: ActivityProfile | None, hashed: str) -> ActivityProfile:
        first, last = self.tokens
        counts = dict(self._counts)
        if before is not None:
            first, last = first + before.tokens[0], last + before.tokens[1]
            known = {name: value for name, value in before.counts.items() if name in counts}
            counts |= {name: counts[name] + value for name, value in known.items()}
        made = ActivityProfile(
            hashed, (first, last), RULE, {name: _stored(value) for name, value in counts.items()}
        )
        while sum(made.tokens) > MAX_TOKENS:
            halved = {name: value // 2 for name, value in made.counts.items()}
            made = replace(made, tokens=(made.tokens[0] // 2, made.tokens[1] // 2), counts=halved)
        return made


def add_in_experts(
    counts: npt.NDArray[np.integer], hidden: Activations, experts: npt.NDArray[np.int64]
) -> None:
    """Add to the counts (experts, neurons) the neurons of `hidden` (tokens, experts per token, neurons) that
    aren't zero.
    """
    active = (hidden != 0).reshape(-1, hidden.shape[2])
    for expert in np.unique(experts):
        counts[expert] += active[experts.reshape(-1) == expert].sum(0, dtype=counts.dtype)


def _stored(counts: npt.NDArray[np.int64]) -> Counts:
    return counts.astype(np.uint32)
