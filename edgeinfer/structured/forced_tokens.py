"""Forced tokens, to which a grammar allows no alternative: appended without a forward, and processed with the
next token.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.protocols import Engine
from edgeinfer.generation.sampled_token import SampledToken
from edgeinfer.sampling import Sampler
from edgeinfer.speculation.speculator import DraftCount
from edgeinfer.structured.constraint import Constraint


class ForcedTokens:
    """The forced tokens of one completion. `together`: maximum tokens per forward; `count` counts them."""

    def __init__(self, engine: Engine, together: int, count: DraftCount) -> None:
        self._engine = engine
        self._together = together
        self._count = count
        self.unread = 0
        """Number of history tokens before the last that the engine hasn't processed."""

    def choose(self, constraint: Constraint, sampler: Sampler, most: int) -> list[SampledToken]:
        """The forced tokens, at most `most`; the sampler has accepted them."""
        found: list[SampledToken] = []
        while len(found) < most and (forced := constraint.forced()) and sampler.take(forced[0]):
            found.append(SampledToken(forced[0], None, True))
        self.unread += len(found)
        return found

    def read(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Process the last token before the forced ones, and these; the logits after the last of them."""
        for first in range(0, len(ids), self._together):
            part = ids[first : first + self._together]
            logits = self._engine.append(part) if len(part) == 1 else self._engine.append_all(part)[-1]
        if self._together > 1 and len(ids) > 1:
            self._count.all_stood(len(ids) - 1, -(-len(ids) // self._together))
        return logits
