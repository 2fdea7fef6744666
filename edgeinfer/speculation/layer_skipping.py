"""Self-speculation by layer skipping: drafts with some of the model's layers, with almost no additional
memory.

The remaining layers read the keys and values of full forwards. Those that they write for draft tokens are
after the text, where the verifying forward overwrites them.
Source: Zhang et al. 2023, "Draft & Verify" (arXiv:2309.08168).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.speculation.autoregressive_drafter import AutoregressiveDrafter
from edgeinfer.speculation.drafter import DraftText

KEPT_SHARE, KEPT_BELOW = 0.5, 0.3
"""Share of the layers that is kept, and share of all layers below the gap. Measured on the built-in model: a
gap that starts there reduces acceptance least, at any length."""


def kept_layers(count: int) -> list[int]:
    """The layers used for drafting: the first and the last ones."""
    kept = max(1, round(KEPT_SHARE * count))
    below = min(kept, max(1, round(KEPT_BELOW * count)))
    return [*range(below), *range(count - (kept - below), count)]


class LayerSkipping(AutoregressiveDrafter):
    """A drafter that uses some layers of the target engine."""

    name = "self"
    nbytes = 0

    def __init__(self, engine: NativeEngine, layers: Sequence[int]) -> None:
        super().__init__(engine.vocabulary_size, engine.vocabulary_size)
        self._engine = engine
        self._layers = tuple(layers)
        self._position = 0

    def prepare_each(self, texts: Sequence[DraftText]) -> list[bool]:
        """It can't: it runs the engine's contiguous text, and these are in pages."""
        return [False] * len(texts)

    def _logits_after(self, history: Sequence[int]) -> npt.NDArray[np.float32] | None:
        """Logits after the last token of `history`; the engine has cached the others."""
        self._position = len(history) - 1
        if self._engine.ids != list(history[:-1]):
            return None
        return self._logits_after_next(history[-1])

    def _logits_after_next(self, token: int) -> npt.NDArray[np.float32]:
        logits = self._engine.logits_of_layers(token, self._position, self._layers)
        self._position += 1
        return logits

    def close(self) -> None:
        """It has no resources."""
