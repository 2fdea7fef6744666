"""The engine of an encoder: hidden states of whole texts, several in one step; there is no cache."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.guards import DEVICE_FAILURES
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import SettingError
from edgeinfer_kernels.backend import HiddenStates

Rows = npt.NDArray[np.float32]


class EncoderEngine(NativeEngine):
    """As `NativeEngine`, for texts instead of the tokens of a cache."""

    def _forward(self, ids: Sequence[int]) -> HiddenStates:
        raise SettingError("an encoder completes no text: use embed")

    def rows(self, ids: Sequence[int]) -> Rows:
        """The final hidden states of one text, (len(ids), hidden size) float32."""
        return next(self.text_rows([ids]))

    def text_rows(self, texts: Sequence[Sequence[int]]) -> Iterator[Rows]:
        """The final hidden states of each text, (tokens, hidden size) float32.

        Raises `ContextOverflowError`: a text is longer than the context.
        """
        for ids in texts:
            self._check(ids)
        for step in _steps(texts, self.capabilities.text_tokens):
            lengths = [len(ids) for ids in step]
            with DEVICE_FAILURES:
                x: HiddenStates = self.backend.embed([token for ids in step for token in ids])
                self.backend.forward_texts(x, lengths)
            yield from np.split(self._normed(x), np.cumsum(lengths)[:-1])


def _steps(texts: Sequence[Sequence[int]], tokens: int) -> Iterator[list[Sequence[int]]]:
    """Successive texts with together at most `tokens` tokens, or one longer text."""
    step: list[Sequence[int]] = []
    used = 0
    for ids in texts:
        if step and used + len(ids) > tokens:
            yield step
            step, used = [], 0
        step.append(ids)
        used += len(ids)
    if step:
        yield step
