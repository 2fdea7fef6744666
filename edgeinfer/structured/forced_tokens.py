"""Tokens that a form leaves no choice about: chosen before anything is read, and read with the next one."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.protocols import Engine
from edgeinfer.generation.sampled_token import SampledToken
from edgeinfer.sampling import Sampler
from edgeinfer.speculation.speculator import DraftCount
from edgeinfer.structured.constraint import Constraint


class ForcedTokens:
    """Those of one answer. `together`: tokens that are read in one pass at most; `count` hears of them."""

    def __init__(self, engine: Engine, together: int, count: DraftCount) -> None:
        self._engine = engine
        self._together = together
        self._count = count
        self.unread = 0
        """Tokens of the history before its last that the engine has still to read."""

    def choose(self, constraint: Constraint, sampler: Sampler, most: int) -> list[SampledToken]:
        """The tokens that have to follow, `most` at most; the sampler has accepted them."""
        found: list[SampledToken] = []
        while len(found) < most and (forced := constraint.forced()) and sampler.take(forced[0]):
            found.append(SampledToken(forced[0], None, True))
        self.unread += len(found)
        return found

    def read(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Read the last token before some without a choice, and these; the logits behind the last of them."""
        for first in range(0, len(ids), self._together):
            part = ids[first : first + self._together]
            logits = self._engine.append(part) if len(part) == 1 else self._engine.append_all(part)[-1]
        if self._together > 1 and len(ids) > 1:
            self._count.all_stood(len(ids) - 1, -(-len(ids) // self._together))
        return logits
