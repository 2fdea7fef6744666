"""Embeds and ranks the texts of a request in steps, between which a disconnected client is detected."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from edgeinfer.embedding import TextVectors
from edgeinfer.model import Model
from edgeinfer.ranking import RankedText, Ranking
from edgeinfer.serving.transport.bodies import Workers

TEXTS_PER_STEP = 16
"""Texts of a request that an encoder processes in one step."""


class TextSteps:
    """The texts of requests for one model, processed on worker threads."""

    def __init__(self, model: Model, workers: Workers) -> None:
        self.model, self._workers = model, workers

    async def vectors(self, texts: Sequence[str]) -> TextVectors:
        """The embeddings, as `Model.text_vectors`."""
        rows = [
            await self._workers.run(partial(self.model.text_vectors, part)) for _, part in self._steps(texts)
        ]
        vectors = np.concatenate([each.vectors for each in rows])
        return TextVectors(vectors, sum(each.tokens for each in rows))

    async def ranking(self, query: str, texts: Sequence[str]) -> Ranking:
        """The texts by relevance, as `Model.ranking`."""
        scored: list[RankedText] = []
        tokens = 0
        for first, part in self._steps(texts):
            ranking = await self._workers.run(partial(self.model.ranking, query, part))
            scored += [replace(each, index=first + each.index) for each in ranking.texts]
            tokens += ranking.tokens
        scored.sort(key=lambda each: (-each.score, each.index))
        return Ranking(scored, tokens)

    def _steps(self, texts: Sequence[str]) -> list[tuple[int, Sequence[str]]]:
        """The texts of each step, with the index of the first."""
        count = TEXTS_PER_STEP if self.model.is_encoder else 1
        return [(first, texts[first : first + count]) for first in range(0, len(texts), count)]
