"""Beam search: finds the most probable completions by extending the best partial sequences."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.protocols import Engine, TextTokenizer
from edgeinfer.generation.detokenizer import Detokenizer
from edgeinfer.generation.shared_prefix import CacheFullError, Sequences, branches_of
from edgeinfer.generation.timer import GenerationTimer
from edgeinfer.generation.token_stream import Request, read_prompt
from edgeinfer.results import FinishReason, Generation, Token
from edgeinfer.sampling import Sampler, SamplerSettings

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class _Beam:
    """A partial completion; `branch` of the cache holds all of its ids except the last."""

    branch: int
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    reason: FinishReason = "length"

    @property
    def total(self) -> float:
        return sum(self.logprobs)

    @property
    def mean(self) -> float:
        """The mean log-probability per token, used to compare completions of different length."""
        return self.total / max(1, len(self.logprobs))


class BeamSearch:
    """Beam search with `beams` sequences; penalties, DRY and biases apply, truncation and sampling don't.

    A sequence that ends is a completion. The search ends when there are `beams` completions and the best open
    sequence has no higher mean log-probability than the worst of them.
    Source: Wu et al. 2016, section 7 (arXiv:1609.08144), with length normalization to the power of one.
    """

    def __init__(self, engine: Engine, tokenizer: TextTokenizer, request: Request, beams: int) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._request = request
        self._beams = beams
        self._sampler = Sampler(_undrawn(request.sampling), engine.vocabulary_size, tokenizer.token_bytes)
        self._clock = GenerationTimer()
        self._passes = self._read = 0
        self._answers: list[_Beam] = []
        self._branches: set[int] = set()
        self._most = request.most_tokens(engine.context)

    def run(self) -> list[Generation]:
        """The best completions, at most `beams`, most probable first."""
        logits = read_prompt(self._engine, self._request, self._clock)
        self._search(logits, branches_of(self._engine))
        ranked = sorted(self._answers, key=lambda beam: beam.mean, reverse=True)
        return [self._generation(beam) for beam in ranked[: self._beams]]

    def _search(self, logits: Logits, branches: Sequences) -> None:
        alive, rows = [_Beam(branches.fork())], [logits]
        self._branches = {alive[0].branch}
        for length in range(1, self._most + 1):
            alive = self._extended(alive, rows)
            self._clock.decoded(len(alive))
            if not alive or self._decided(alive):
                return
            if length == self._most:
                break
            self._clock.resume()
            try:
                alive, rows = self._advance(alive, branches)
            except CacheFullError:
                break
        reason = self._request.full_reason(self._engine.context)
        self._answers += [replace(beam, reason=reason) for beam in alive]

    def _extended(self, alive: Sequence[_Beam], rows: Sequence[Logits]) -> list[_Beam]:
        """The best sequences extended by one token; those that end are added to the completions."""
        longer: list[_Beam] = []
        for beam, logits in zip(alive, rows, strict=True):
            ids, chances = self._sampler.distribution(logits, [*self._request.prompt_ids, *beam.ids])
            best = np.argsort(-chances, kind="stable")[: 2 * self._beams]
            for place in best:
                step = float(np.log(chances[place]))
                longer.append(
                    replace(beam, ids=(*beam.ids, int(ids[place])), logprobs=(*beam.logprobs, step))
                )
        longer.sort(key=lambda beam: beam.total, reverse=True)
        kept: list[_Beam] = []
        for rank, beam in enumerate(longer[: 2 * self._beams]):
            if beam.ids[-1] in self._tokenizer.end_ids:
                if rank < self._beams:
                    self._answers.append(replace(beam, ids=beam.ids[:-1], reason="stop"))
            elif len(kept) < self._beams:
                kept.append(beam)
        return kept

    def _decided(self, alive: Sequence[_Beam]) -> bool:
        if len(self._answers) < self._beams:
            return False
        worst = sorted((beam.mean for beam in self._answers), reverse=True)[self._beams - 1]
        return max(beam.mean for beam in alive) <= worst

    def _advance(self, alive: Sequence[_Beam], branches: Sequences) -> tuple[list[_Beam], list[Logits]]:
        """Process the last token of every beam, each in a separate branch.

        Of several beams from one branch, the first continues in it; a branch without beams is dropped.
        """
        for branch in self._branches - {beam.branch for beam in alive}:
            branches.drop(branch)
        taken: set[int] = set()
        own: list[_Beam] = []
        for beam in alive:
            own.append(replace(beam, branch=branches.fork(beam.branch)) if beam.branch in taken else beam)
            taken.add(beam.branch)
        self._branches = {beam.branch for beam in own}
        rows = branches.read([(beam.branch, beam.ids[-1]) for beam in own])
        self._passes += -(-len(own) // branches.together)
        self._read += len(own)
        return own, list(rows)

    def _generation(self, beam: _Beam) -> Generation:
        text = Detokenizer(self._tokenizer, ())
        tokens: list[Token] = []
        for token_id, logprob in zip(beam.ids, beam.logprobs, strict=False):
            tokens += text.push(Token(token_id, "", logprob=logprob))
        tokens += text.finish()
        speed = self._clock.speed(len(beam.ids), self._engine.bytes_per_token)
        if self._passes:
            speed = speed.side_by_side(self._read / self._passes)
        return Generation(
            text="".join(token.text for token in tokens),
            ids=list(beam.ids),
            finish_reason=beam.reason,
            speed=speed,
            prompt_ids=self._request.prompt_ids,
            tokens=tokens,
            mean_logprob=beam.mean,
        )


def _undrawn(settings: SamplerSettings) -> SamplerSettings:
    """The settings that change logits, without truncation and sampling."""
    return replace(
        settings,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        typical_p=1.0,
        xtc_probability=0.0,
        mirostat=0,
        seed=None,
    )
