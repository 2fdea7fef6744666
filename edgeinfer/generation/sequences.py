"""Several sampled completions of one prompt in a batch: one prefill; each forward has a token of each."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.protocols import Engine, TextTokenizer
from edgeinfer.generation.detokenizer import Detokenizer
from edgeinfer.generation.sampled_token import SampledToken
from edgeinfer.generation.shared_prefix import CacheFullError, Sequences, branches_of
from edgeinfer.generation.timer import GenerationTimer
from edgeinfer.generation.token_stream import Request, described, read_prompt
from edgeinfer.results import FinishReason, Generation, Token
from edgeinfer.sampling import Sampler
from edgeinfer.structured.constraint import Constraint


@dataclass
class _Answer:
    """One completion in progress; `read`: the number of its ids in its branch of the cache."""

    sampler: Sampler
    text: Detokenizer
    ids: list[int]
    read: int
    branch: int | None = None
    said: list[Token] = field(default_factory=list)
    shown: list[Token] = field(default_factory=list)
    reason: FinishReason | None = None


class SequenceGroup:
    """`count` completions of `request`, each with a separate sampler: seeds are consecutive if one is given.

    Completion 0 equals that of a stream. If the cache can't hold all, the ones started last wait.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: TextTokenizer,
        request: Request,
        count: int,
        constraint: Callable[[], Constraint | None],
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._request = request
        self._clock = GenerationTimer()
        self._passes = self._drawn = 0
        seed = request.sampling.seed
        self._answers = [
            _Answer(
                Sampler(
                    replace(request.sampling, seed=None if seed is None else seed + index),
                    engine.vocabulary_size,
                    tokenizer.token_bytes,
                    constraint(),
                ),
                Detokenizer(tokenizer, request.stop),
                list(request.prompt_ids),
                len(request.prompt_ids),
            )
            for index in range(count)
        ]
        self._most = request.most_tokens(engine.context)
        for answer in self._answers:
            if isinstance(answer.sampler.constraint, Constraint):
                answer.sampler.constraint.limit(self._most)

    def run(self) -> list[Generation]:
        """All completions, in the order of their seeds."""
        logits = read_prompt(self._engine, self._request, self._clock)
        if self._most == 0:
            reason = self._request.full_reason(self._engine.context)
            return [self._generation(replace(answer, reason=reason)) for answer in self._answers]
        for answer in self._answers:
            self._draw(answer, logits)
        self._clock.decoded(len(self._answers))
        self._draw_all(branches_of(self._engine))
        return [self._generation(answer) for answer in self._answers]

    def _draw_all(self, branches: Sequences) -> None:
        waiting = deque(answer for answer in self._answers if answer.reason is None)
        active: list[_Answer] = []
        most = branches.together
        while active or waiting:
            while waiting and len(active) < most:
                active.append(waiting.popleft())
                active[-1].branch = branches.fork()
                active[-1].read = len(self._request.prompt_ids)
            self._clock.resume()
            try:
                rows = self._read(branches, active)
            except CacheFullError:
                self._put_off(branches, active, waiting)
                most = max(1, len(active))
                continue
            for answer, logits in zip(active, rows, strict=True):
                self._draw(answer, logits)
            self._clock.decoded(len(active))
            self._passes += 1
            self._drawn += len(active)
            for answer in [answer for answer in active if answer.reason is not None]:
                assert answer.branch is not None
                branches.drop(answer.branch)
                active.remove(answer)
                most = branches.together  # there is space again

    def _read(self, branches: Sequences, active: Sequence[_Answer]) -> list[npt.NDArray[np.float32]]:
        """Logits after each completion; usually processes one token of each, more after a wait."""
        tokens: list[tuple[int, int]] = []
        last: list[int] = []
        for answer in active:
            assert answer.branch is not None
            tokens += [(answer.branch, token) for token in answer.ids[answer.read :]]
            last.append(len(tokens) - 1)
        logits = branches.read(tokens)
        for answer in active:
            answer.read = len(answer.ids)
        return [logits[row] for row in last]

    @staticmethod
    def _put_off(branches: Sequences, active: list[_Answer], waiting: deque[_Answer]) -> None:
        """Pause the completion started last until another one ends; if it is the only one, it ends."""
        answer = active.pop()
        assert answer.branch is not None
        branches.drop(answer.branch)
        answer.branch = None
        if active:
            waiting.appendleft(answer)
        else:
            answer.reason = "context"

    def _draw(self, answer: _Answer, logits: npt.NDArray[np.float32]) -> None:
        """Sample the next token of a completion, and check whether it is the last."""
        chosen = answer.sampler.sample(logits, answer.ids)
        answer.sampler.accept(chosen)
        constraint = answer.sampler.constraint
        closed = isinstance(constraint, Constraint) and constraint.closed_early
        complete = self._request.full_reason(self._engine.context) if closed else "stop"
        if chosen in self._tokenizer.end_ids:
            answer.reason = complete
        else:
            answer.ids.append(chosen)
            token = described(SampledToken(chosen, logits), self._request.logprobs)
            answer.said.append(token)
            answer.shown += answer.text.push(token)
            if answer.text.stopped:
                answer.reason = "stop"
            elif isinstance(constraint, Constraint) and constraint.finished:
                answer.reason = complete
            elif len(answer.said) == self._most:
                answer.reason = self._request.full_reason(self._engine.context)
        if answer.reason is not None:
            answer.shown += answer.text.finish()

    def _generation(self, answer: _Answer) -> Generation:
        speed = self._clock.speed(len(answer.said), self._engine.bytes_per_token)
        if self._passes:
            speed = speed.side_by_side(self._drawn / self._passes)
        chances = [token.logprob for token in answer.said if token.logprob is not None]
        assert answer.reason is not None
        return Generation(
            text="".join(token.text for token in answer.shown),
            ids=[token.id for token in answer.shown],
            finish_reason=answer.reason,
            speed=speed,
            prompt_ids=self._request.prompt_ids,
            tokens=answer.shown,
            mean_logprob=sum(chances) / len(chances) if chances else None,
        )


def best_answers(answers: Sequence[Generation], count: int) -> list[Generation]:
    """The `count` completions with the highest mean log-probability per token, best first."""
    worst = -np.inf
    ranked = sorted(answers, key=lambda a: worst if a.mean_logprob is None else a.mean_logprob, reverse=True)
    return ranked[:count]
