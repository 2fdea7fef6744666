"""Several drafters in order: the first that returns a draft is used."""

from collections.abc import Sequence

from edgeinfer.sampling.settings import SamplerSettings
from edgeinfer.speculation.drafts import Draft, Drafter


class ChainedDrafter:
    """A drafter made of others, cheapest first."""

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
        """The first non-empty draft."""
        for drafter in self._drafters:
            draft = drafter.propose(history, settings, least, further)
            if draft.ids:
                return draft
        return Draft(())

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()
