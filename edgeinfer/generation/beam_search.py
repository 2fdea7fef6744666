"""Beam search: finds the most probable completions by extending the best partial sequences."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.protocols import Engine, TextTokenizer
from edgeinfer.generation.loop import GenerationTimer
from edgeinfer.generation.prefill import read_prompt
from edgeinfer.generation.request import Request
from edgeinfer.generation.shared_prefix import CacheFullError, Sequences
from edgeinfer.results import FinishReason, Generation, Token
from edgeinfer.sampling import Sampler
from edgeinfer.tokenizer.detokenizer import Detokenizer

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class _Beam:
    """A partial completion; `sequence` of the cache holds all of its ids except the last."""

    sequence: int
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
        self._sampler = Sampler(
            replace(request.sampling, temperature=1.0, seed=None),
            engine.vocabulary_size,
            tokenizer.token_bytes,
            stages=["adjust"],
        )
        self._timer = GenerationTimer()
        self._forwards = self._tokens = 0
        self._completions: list[_Beam] = []
        self._sequences: set[int] = set()
        self._max_tokens = request.max_new_tokens(engine.context)

    def run(self, sequences: Callable[[], Sequences]) -> list[Generation]:
        """The best completions, at most `beams`, most probable first. `sequences`: returns those that
        continue the engine's text.
        """
        logits = read_prompt(self._engine, self._request, self._timer)
        with closing(sequences()) as cached:
            self._search(logits, cached)
        ranked = sorted(self._completions, key=lambda beam: beam.mean, reverse=True)
        return [self._generation(beam) for beam in ranked[: self._beams]]

    def _search(self, logits: Logits, cached: Sequences) -> None:
        live, rows = [_Beam(cached.first)], [logits]
        self._sequences = {live[0].sequence}
        for length in range(1, self._max_tokens + 1):
            live = self._extended(live, rows)
            self._timer.decoded(len(live))
            if not live or self._is_finished(live):
                return
            if length == self._max_tokens:
                break
            self._timer.resume()
            try:
                live, rows = self._advance(live, cached)
            except CacheFullError:
                break
        reason = self._request.full_reason(self._engine.context)
        self._completions += [replace(beam, reason=reason) for beam in live]

    def _extended(self, live: Sequence[_Beam], rows: Sequence[Logits]) -> list[_Beam]:
        """The best sequences extended by one token; those that end are added to the completions."""
        longer: list[_Beam] = []
        for beam, logits in zip(live, rows, strict=True):
            ids, probs = self._sampler.distribution(logits, [*self._request.prompt_ids, *beam.ids])
            best = np.argsort(-probs, kind="stable")[: 2 * self._beams]
            for index in best:
                step = float(np.log(probs[index]))
                longer.append(
                    replace(beam, ids=(*beam.ids, int(ids[index])), logprobs=(*beam.logprobs, step))
                )
        longer.sort(key=lambda beam: beam.total, reverse=True)
        open_beams: list[_Beam] = []
        for rank, beam in enumerate(longer[: 2 * self._beams]):
            if beam.ids[-1] in self._tokenizer.end_ids:
                if rank < self._beams:
                    self._completions.append(replace(beam, ids=beam.ids[:-1], reason="stop"))
            elif len(open_beams) < self._beams:
                open_beams.append(beam)
        return open_beams

    def _is_finished(self, live: Sequence[_Beam]) -> bool:
        if len(self._completions) < self._beams:
            return False
        worst = sorted((beam.mean for beam in self._completions), reverse=True)[self._beams - 1]
        return max(beam.mean for beam in live) <= worst

    def _advance(self, live: Sequence[_Beam], cached: Sequences) -> tuple[list[_Beam], list[Logits]]:
        """Process the last token of every beam, each in a separate sequence.

        Of several beams from one sequence, the first continues in it; a sequence without beams is dropped.
        """
        for sequence in self._sequences - {beam.sequence for beam in live}:
            cached.drop(sequence)
        used: set[int] = set()
        extended: list[_Beam] = []
        for beam in live:
            extended.append(
                replace(beam, sequence=cached.fork(beam.sequence)) if beam.sequence in used else beam
            )
            used.add(beam.sequence)
        self._sequences = {beam.sequence for beam in extended}
        rows = cached.read([(beam.sequence, beam.ids[-1]) for beam in extended])
        self._forwards += -(-len(extended) // cached.together)
        self._tokens += len(extended)
        return extended, list(rows)

    def _generation(self, beam: _Beam) -> Generation:
        text = Detokenizer(self._tokenizer.stream_decoder(), ())
        tokens: list[Token] = []
        for token_id, logprob in zip(beam.ids, beam.logprobs, strict=False):
            tokens += text.push(Token(token_id, text.text_of(token_id), logprob=logprob))
        tokens += text.finish()
        speed = self._timer.speed(len(beam.ids), self._engine.bytes_per_token)
        if self._forwards:
            speed = speed.side_by_side(self._tokens / self._forwards)
        return Generation(
            text="".join(token.text for token in tokens),
            ids=list(beam.ids),
            finish_reason=beam.reason,
            speed=speed,
            prompt_ids=self._request.prompt_ids,
            tokens=tokens,
            mean_logprob=beam.mean,
        )
