"""An engine that says a given text at the cost of a real model's passes, for what no small model writes."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.protocols import Engine, Progress, TokenSampler
from edgeinfer.sampling import Sampler
from edgeinfer.snapshots.snapshot_file import Snapshot

CERTAIN = 1e4
"""The logit of the token that comes next, above all of a model's own."""


class ScriptedChoice:
    """Reads as `choice`, and names the tokens of a script in place of those that it chooses."""

    def __init__(self, choice: TokenSampler, script: Sequence[int]) -> None:
        self._choice = choice
        self._script = script

    def next(self, history: Sequence[int], ahead: bool = True) -> int | None:
        """As the choice's, but for which token follows."""
        if self._choice.next(history, ahead) is None:
            return None
        return self._script[min(len(history), len(self._script) - 1)]


class ScriptedEngine:
    """Reads through `engine`; its logits name the tokens of `script`, prompt and answer, one by one."""

    def __init__(self, engine: Engine, script: Sequence[int]) -> None:
        self._engine = engine
        self._script = list(script)
        self.context = min(engine.context, len(script))
        self.largest_context = engine.largest_context
        self.vocabulary_size = engine.vocabulary_size
        self.bytes_per_token = engine.bytes_per_token

    @property
    def ids(self) -> list[int]:
        return self._engine.ids

    def append(self, ids: Sequence[int], progress: Progress | None = None) -> npt.NDArray[np.float32]:
        """As the engine's, but for what is in the logits."""
        logits = self._engine.append(ids, progress)
        self._say(logits, len(self.ids))
        return logits

    def append_all(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """As the engine's, but for what is in the logits."""
        logits = self._engine.append_all(ids)
        for row, end in zip(logits, range(len(self.ids) - len(ids) + 1, len(self.ids) + 1), strict=True):
            self._say(row, end)
        return logits

    def _say(self, logits: npt.NDArray[np.float32], place: int) -> None:
        logits[self._script[min(place, len(self._script) - 1)]] = CERTAIN

    def rows(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """The engine's own."""
        return self._engine.rows(ids)

    def snapshot(self) -> Snapshot | None:
        """The engine's own."""
        return self._engine.snapshot()

    def restore(self, snapshot: Snapshot, length: int) -> None:
        """The engine's own."""
        self._engine.restore(snapshot, length)

    def rewind(self, length: int) -> None:
        self._engine.rewind(length)

    def choice(self, sampler: Sampler) -> TokenSampler | None:
        choice = self._engine.choice(sampler)
        return ScriptedChoice(choice, self._script) if choice else None

    def close(self) -> None:
        """The engine belongs to somebody else."""
