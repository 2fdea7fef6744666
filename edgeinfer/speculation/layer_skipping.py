"""Guesses by the model itself, some of its layers left out: no second model, and hardly any memory.

The layers that are left read the keys and values that whole passes wrote; what they write themselves for
guessed tokens lies behind the text, where the pass that checks them writes over it.
Source: Zhang et al. 2023, "Draft & Verify" (arXiv:2309.08168).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.speculation.autoregressive_drafter import AutoregressiveDrafter

KEPT_SHARE, KEPT_BELOW = 0.5, 0.3
"""Of the layers: what is kept, and what of all lies below the gap. Measured on the built-in model, a gap from
there on hurts least, whatever its length.
"""


def kept_layers(count: int) -> list[int]:
    """The layers that guess: the first and the last ones."""
    kept = max(1, round(KEPT_SHARE * count))
    below = min(kept, max(1, round(KEPT_BELOW * count)))
    return [*range(below), *range(count - (kept - below), count)]


class LayerSkipping(AutoregressiveDrafter):
    """The drafter that is a part of the engine it guesses for."""

    name = "self"
    nbytes = 0

    def __init__(self, engine: NativeEngine, layers: Sequence[int]) -> None:
        super().__init__(engine.vocabulary_size, engine.vocabulary_size)
        self._engine = engine
        self._layers = tuple(layers)
        self._position = 0

    def _behind(self, history: Sequence[int]) -> npt.NDArray[np.float32] | None:
        """Logits behind the last token of `history`, all others of which the engine holds."""
        self._position = len(history) - 1
        if self._engine.ids != list(history[:-1]):
            return None
        return self._following(history[-1])

    def _following(self, token: int) -> npt.NDArray[np.float32]:
        logits = self._engine.read_by_some_layers(token, self._position, self._layers)
        self._position += 1
        return logits

    def close(self) -> None:
        """Nothing of its own."""
