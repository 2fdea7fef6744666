"""Scripted engines, and drafters with a given acceptance rate and the cost of a small model's forwards.

With random weights no small model can predict the tokens. So baseline decoding runs first, and the drafter
proposes its tokens, each replaced with a given probability. For every token it evaluates the small model and
ignores the logits.
"""

import random
import time
from collections.abc import Hashable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from edgeinfer import Model
from edgeinfer.benchmarking.tables import markdown
from edgeinfer.engine.hidden_states import HiddenObserver, HiddenStep
from edgeinfer.engine.protocols import BasicEngine, Engine, PromptSteps, TokenSampler
from edgeinfer.loading.loading import load
from edgeinfer.results import Generation
from edgeinfer.sampling import Sampler
from edgeinfer.snapshots.snapshot_file import Snapshot
from edgeinfer.speculation.draft_model import DraftModel
from edgeinfer.speculation.drafter import Draft, Drafter, DraftRequest, DraftText
from edgeinfer.speculation.speculator import Speculator

SHARED_AGREEMENTS, PLANTED_CONTEXT = (0.8, 0.0), 512
"""Of the drafts of several streams."""
CERTAIN = 1e4
"""The logit of the token that comes next, above all logits of a model."""


class ScriptedSampler:
    """Evaluates as `sampler`, and returns the tokens of a script instead of the sampled ones."""

    def __init__(self, sampler: TokenSampler, script: Sequence[int]) -> None:
        self._sampler = sampler
        self._script = script

    def next(self, history: Sequence[int], ahead: bool = True) -> int | None:
        """As the sampler's, with the token of the script."""
        if self._sampler.next(history, ahead) is None:
            return None
        return self._script[min(len(history), len(self._script) - 1)]


class ScriptedEngine(BasicEngine):
    """Evaluates `engine`; the logits select the tokens of `script`, prompt and completion, one by one."""

    def __init__(self, engine: Engine, script: Sequence[int]) -> None:
        self._engine = engine
        self._script = list(script)
        self.ids = engine.ids
        self.context = min(engine.context, len(script))
        self.largest_context = engine.largest_context
        self.vocabulary_size = engine.vocabulary_size
        self.bytes_per_token = engine.bytes_per_token

    def prompt_steps(self, ids: Sequence[int], limit: int | None = None) -> PromptSteps:
        """As the engine's, with the logits of the script."""
        logits = yield from self._engine.prompt_steps(ids, limit)
        self._set_logits(logits, len(self.ids))
        return logits

    def append_all(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """As the engine's, with the logits of the script."""
        logits = self._engine.append_all(ids)
        for row, end in zip(logits, range(len(self.ids) - len(ids) + 1, len(self.ids) + 1), strict=True):
            self._set_logits(row, end)
        return logits

    def append_best(self, ids: Sequence[int]) -> list[int] | None:
        """As the engine's, with the tokens of the script."""
        if self._engine.append_best(ids) is None:
            return None
        ends = range(len(self.ids) - len(ids) + 1, len(self.ids) + 1)
        return [self._script[min(end, len(self._script) - 1)] for end in ends]

    def _set_logits(self, logits: npt.NDArray[np.float32], index: int) -> None:
        logits[self._script[min(index, len(self._script) - 1)]] = CERTAIN

    def rows(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """As the engine's."""
        return self._engine.rows(ids)

    def snapshot(self) -> Snapshot | None:
        """As the engine's."""
        return self._engine.snapshot()

    def restore(self, snapshot: Snapshot, length: int) -> None:
        """As the engine's."""
        self._engine.restore(snapshot, length)

    def rewind(self, length: int) -> None:
        self._engine.rewind(length)

    def device_sampler(self, sampler: Sampler) -> TokenSampler | None:
        choice = self._engine.device_sampler(sampler)
        return ScriptedSampler(choice, self._script) if choice else None

    def hand_out(self, layers: Sequence[int], observer: HiddenObserver) -> None:
        """As the engine's."""
        self._engine.hand_out(layers, observer)

    def close(self) -> None:
        """Does nothing: the caller owns the engine."""


class PlantedDrafter(Drafter):
    """Draft tokens are accepted with the probability `agreement`; `answer`: ids of prompt and completion."""

    name = "planted"
    nbytes = 0

    def __init__(self, cost: Engine, answer: Sequence[int], agreement: float, seed: int = 1) -> None:
        self._cost = cost
        self._answer = list(answer)
        self._agreement = agreement
        self._random = random.Random(seed)

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        """As many of the requested tokens as are profitable by their probability of being reached.

        The first token that isn't is evaluated too, as with a real draft model.
        """
        known = self._answer[len(history) :] if history[0] == self._answer[0] else self._answer
        ids: list[int] = []
        self._catch_up(len(history) - 1)
        for token in known[: request.max_tokens]:
            read = history[-1] if not ids else ids[-1]
            self._cost.append([read % self._cost.vocabulary_size])
            if self._agreement ** (len(ids) + 1) < request.min_prob:
                break
            accepted = self._random.random() < self._agreement
            ids.append(token if accepted else (token + 1) % self._cost.vocabulary_size)
        return Draft(tuple(ids))

    def _catch_up(self, length: int) -> None:
        """Extend the cache to the text's length, as a real draft model does."""
        held = len(self._cost.ids)
        if held > length:
            self._cost.rewind(length)
        elif held < length:
            self._cost.append([0] * (length - held))

    def close(self) -> None:
        """It has no resources."""


class PlantedHead(Drafter):
    """Draft tokens that are accepted with given probabilities, at the cost of a real draft head.

    `agreements`: of the first draft token, of the second if the first is accepted, and so on; the last one is
    that of all further ones. `answer`: ids of prompt and completion.
    """

    name = "planted head"

    def __init__(
        self, head: Drafter, answer: Sequence[int], agreements: Sequence[float], vocabulary: int
    ) -> None:
        self._head, self._answer, self._vocabulary = head, list(answer), vocabulary
        self._agreements = tuple(agreements)
        self._random = random.Random(1)

    @property
    def hidden_layers(self) -> Sequence[int]:
        return self._head.hidden_layers

    def observe(self, step: HiddenStep) -> None:
        """As the head's."""
        self._head.observe(step)

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        """As many of the requested tokens as are profitable by their probability of being reached.

        The first token that isn't is evaluated too, as with a real head.
        """
        known = self._answer[len(history) :] if history[0] == self._answer[0] else self._answer
        rates = [self._agreement(index) for index in range(min(len(known), request.max_tokens))]
        reached = np.cumprod(rates)
        kept = int((reached >= request.min_prob).sum())
        if not rates:
            return Draft()
        evaluated = min(kept + 1, len(rates))
        drafted = self._head.propose(history, DraftRequest(evaluated, request.params))
        if not drafted.ids:
            return Draft()
        ids = [
            token if self._random.random() < rate else (token + 1) % self._vocabulary
            for token, rate in zip(known[:kept], rates, strict=False)
        ]
        return Draft(tuple(ids))

    def _agreement(self, index: int) -> float:
        return self._agreements[min(index, len(self._agreements) - 1)]

    def close(self) -> None:
        """The caller owns the head."""


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
        return self.propose_each([DraftText(0, history, request)])[0]

    def propose_each(self, texts: Sequence[DraftText]) -> list[Draft]:
        """As many of the requested tokens as are likely enough to be reached."""
        size = self._model.engine.vocabulary_size
        wanted = [
            DraftText(text.key, [token % size for token in text.history], self._likely(text.request))
            for text in texts
        ]
        made = self._model.propose_each(wanted)
        return [self._planted(text.history, draft) for text, draft in zip(wanted, made, strict=True)]

    def _likely(self, request: DraftRequest) -> DraftRequest:
        count = request.max_tokens
        while count and self._agreement**count < request.min_prob:
            count -= 1
        return DraftRequest(count, request.params)

    def _planted(self, history: Sequence[int], draft: Draft) -> Draft:
        answer = self._answers[tuple(history[:8])]
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
    places, context = max(streams) + 1, PLANTED_CONTEXT
    with (
        load(target, draft=None, device=device, threads=threads, context=context, parallel=places) as model,
        load(draft, draft=None, device=device, threads=threads, context=context, parallel=places) as small,
    ):
        rows = []
        for count in streams:
            prompts = [random.Random(seed).choices(range(1000, 9000), k=24) for seed in range(count)]
            plain = _run(model, prompts, tokens)[1]
            answers = [[*prompt, *each.ids] for prompt, each in zip(prompts, plain, strict=True)]
            for agreement in SHARED_AGREEMENTS:
                drafter = PlantedDrafts(
                    DraftModel(small.engine, model.engine.vocabulary_size, 0), answers, agreement
                )
                speculator = Speculator(model.engine, drafter)
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
