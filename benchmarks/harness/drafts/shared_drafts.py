"""Several streams at once with and without drafts, whose tokens are accepted with a given probability."""

import random
import time
from collections.abc import Hashable, Sequence
from pathlib import Path
from statistics import median

from edgeinfer import Model
from edgeinfer.benchmarking.tables import markdown
from edgeinfer.loading.loading import load
from edgeinfer.results import Generation
from edgeinfer.speculation.draft_model import DraftModel
from edgeinfer.speculation.drafter import Draft, Drafter, DraftRequest, DraftText
from edgeinfer.speculation.speculator import Speculator

AGREEMENTS, CONTEXT = (0.8, 0.0), 512


class PlantedDrafts(Drafter):
    """Draft tokens of `model` at its cost, replaced by those of `answers` (prompts and completions), each
    wrong with the probability 1 - `agreement`.
    """

    name = "planted"

    def __init__(self, model: DraftModel, answers: Sequence[Sequence[int]], agreement: float) -> None:
        self._model, self._agreement = model, agreement
        self._answers = {tuple(answer[:8]): list(answer) for answer in answers}
        self._random = random.Random(1)

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        """As `propose_each`, in the draft model's contiguous text."""
        wanted = self._known(DraftText(0, history, request))
        return self._planted(history, self._model.propose(wanted.history, wanted.request))

    def prepare_each(self, texts: Sequence[DraftText]) -> list[bool]:
        return self._model.prepare_each([self._known(text) for text in texts])

    def propose_each(self, texts: Sequence[DraftText]) -> list[Draft]:
        """As many of the requested tokens as are likely enough to be reached."""
        made = self._model.propose_each([self._known(text) for text in texts])
        return [self._planted(text.history, draft) for text, draft in zip(texts, made, strict=True)]

    def _known(self, text: DraftText) -> DraftText:
        """The text with ids that the draft model has."""
        size = self._model.engine.vocabulary_size
        return DraftText(text.key, [token % size for token in text.history], self._likely(text.request))

    def _likely(self, request: DraftRequest) -> DraftRequest:
        count = request.max_tokens
        while count and self._agreement**count < request.min_prob:
            count -= 1
        return DraftRequest(count, request.params)

    def _planted(self, history: Sequence[int], draft: Draft) -> Draft:
        answer = self._answers.get(tuple(history[:8]), [0] * (len(history) + len(draft.ids)))
        known = answer[len(history) : len(history) + len(draft.ids)]
        return Draft(
            tuple(token if self._random.random() < self._agreement else token ^ 1 for token in known)
        )

    def forget(self, key: Hashable) -> None:
        self._model.forget(key)


def drafts_table(
    target: Path, draft: Path, device: str, threads: int, streams: Sequence[int], tokens: int, rounds: int
) -> str:
    """Tokens/s of all streams without and with drafts, alternating; medians of the rounds and best."""
    places, context = max(streams) + 1, CONTEXT
    with (
        load(target, draft=None, device=device, threads=threads, context=context, parallel=places) as model,
        load(draft, draft=None, device=device, threads=threads, context=context, parallel=places) as small,
    ):
        rows = []
        for count in streams:
            vocabulary = min(model.engine.vocabulary_size, small.engine.vocabulary_size)
            prompts = [random.Random(seed).choices(range(vocabulary), k=24) for seed in range(count)]
            plain = _run(model, prompts, tokens)[1]
            answers = [[*prompt, *each.ids] for prompt, each in zip(prompts, plain, strict=True)]
            for agreement in AGREEMENTS:
                drafter = PlantedDrafts(
                    DraftModel(small.engine, model.engine.vocabulary_size, 0), answers, agreement
                )
                speculator = Speculator(model.engine, drafter)
                speculator.begin(speculator.measure(), {})
                without, drafting, shares = [], [], []
                for done in range(rounds + 1):
                    rates = []
                    for each in (None, speculator):
                        model.speculator = each
                        rate, completions = _run(model, prompts, tokens)
                        rates.append(rate)
                        assert [c.ids for c in completions] == [c.ids for c in plain] or device != "cpu"
                    if done:
                        without.append(rates[0])
                        drafting.append(rates[1])
                        shares += [s for c in completions if (s := c.speed.accepted_share) is not None]
                model.speculator = None
                rows.append(
                    [
                        *(str(count), f"{agreement:.0%}", f"{max(without):.1f}", f"{max(drafting):.1f}"),
                        f"{max(drafting) / max(without):.2f}x",
                        f"{median(drafting) / median(without):.2f}x",
                        f"{median(shares):.0%}" if shares else "-",
                    ]
                )
    head = ["streams", "agreement", "tokens/s of all", "with drafts", "best", "median", "accepted"]
    return markdown(head, rows, left=())


def _run(model: Model, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, list[Generation]]:
    begin = time.perf_counter()
    completions = model.generate([list(each) for each in prompts], max_tokens=tokens, temperature=0.0)
    seconds = time.perf_counter() - begin
    return sum(len(each.ids) for each in completions) / seconds, completions
