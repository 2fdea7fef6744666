"""Several drafters in turn: the first that has a guess makes it."""

from collections.abc import Sequence

from edgeinfer.sampling.settings import SamplerSettings
from edgeinfer.speculation.drafts import Draft, Drafter


class ChainedDrafter:
    """A drafter made of others, the cheapest first."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)
        self.name = ", then ".join(drafter.name for drafter in drafters)

    @property
    def nbytes(self) -> int:
        return sum(drafter.nbytes for drafter in self._drafters)

    def propose(
        self,
        history: Sequence[int],
        settings: SamplerSettings,
        least: Sequence[float],
        further: Sequence[float] = (),
    ) -> Draft:
        """What the first of them guesses that guesses anything."""
        for drafter in self._drafters:
            draft = drafter.propose(history, settings, least, further)
            if draft.ids:
                return draft
        return Draft(())

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()
