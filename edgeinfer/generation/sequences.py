"""Several sampled completions of one prompt in a batch: one prefill; each forward has a token of each."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.protocols import Engine, TextTokenizer
from edgeinfer.generation.loop import GenerationLoop, GenerationSequence, GenerationTimer, SampledToken
from edgeinfer.generation.prefill import read_prompt
from edgeinfer.generation.request import Request
from edgeinfer.generation.shared_prefix import CacheFullError, Sequences, cached_sequences
from edgeinfer.results import Generation, Token
from edgeinfer.structured.constraint import Constraint


class BatchDecode:
    """One forward for all sequences that the cache can hold; those that started last wait."""

    def __init__(self, cached: Sequences, prompt_tokens: int) -> None:
        self._cached = cached
        self._prompt_tokens = prompt_tokens
        self._held: dict[GenerationSequence, tuple[int, int]] = {}
        """The number of a decoded sequence in the cache, and how many of its ids were processed."""
        self._max_held = cached.together
        self.forwards = self.tokens = 0

    def step(self, sequences: Sequence[GenerationSequence]) -> list[list[SampledToken]]:
        """One token of each sequence that the cache can hold."""
        self._drop([sequence for sequence in self._held if sequence.reason is not None])
        waiting = deque(sequence for sequence in sequences if sequence not in self._held)
        rows: list[npt.NDArray[np.float32]] | None = None
        while rows is None:
            while waiting and len(self._held) < self._max_held:
                self._held[waiting.popleft()] = self._cached.fork(), self._prompt_tokens
            try:
                rows = self._forward()
            except CacheFullError:
                last = list(self._held)[-1]
                self._drop([last])
                self._max_held = max(1, len(self._held))
                if not self._held:  # it alone fills the context
                    last.reason = "context"
                    return [[] for _ in sequences]
        sampled = {s: s.sample(logits) for s, logits in zip(self._held, rows, strict=True)}
        self.forwards += 1
        self.tokens += len(sampled)
        return [[sampled[s]] if s in sampled else [] for s in sequences]

    def _drop(self, sequences: Sequence[GenerationSequence]) -> None:
        for sequence in sequences:
            self._cached.drop(self._held.pop(sequence)[0])
            self._max_held = self._cached.together  # there is space again

    def _forward(self) -> list[npt.NDArray[np.float32]]:
        """Logits after each sequence; usually processes one token of each, more after a wait."""
        tokens: list[tuple[int, int]] = []
        last: list[int] = []
        for sequence, (number, processed) in self._held.items():
            tokens += [(number, token) for token in sequence.ids[processed:]]
            last.append(len(tokens) - 1)
        logits = self._cached.read(tokens)
        self._held = {s: (number, len(s.ids)) for s, (number, _) in self._held.items()}
        return [logits[row] for row in last]


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
        self._request = request
        self._timer = GenerationTimer()
        self._forwards = self._tokens = 0
        seed = request.sampling.seed
        params = [
            replace(request.sampling, seed=None if seed is None else seed + index) for index in range(count)
        ]
        self._sequences = [
            GenerationSequence(
                replace(request, sampling=each, constraint=constraint()),
                tokenizer,
                engine.vocabulary_size,
                engine.context,
            )
            for each in params
        ]

    def run(self) -> list[Generation]:
        """All completions, in the order of their seeds."""
        logits = read_prompt(self._engine, self._request, self._timer)
        emitted: dict[GenerationSequence, list[Token]] = {sequence: [] for sequence in self._sequences}
        live = [sequence for sequence in self._sequences if sequence.reason is None]
        decode = BatchDecode(cached_sequences(self._engine), len(self._request.prompt_ids))
        loop = GenerationLoop(live, decode, self._timer)
        first = [[sequence.sample(logits)] for sequence in live]
        self._timer.decoded(len(live))
        for sequence, token in loop.append(first):
            emitted[sequence].append(token)
        while loop.live:
            for sequence, token in loop.step():
                emitted[sequence].append(token)
        self._forwards, self._tokens = decode.forwards, decode.tokens
        return [self._generation(sequence, tokens) for sequence, tokens in emitted.items()]

    def _generation(self, sequence: GenerationSequence, tokens: list[Token]) -> Generation:
        speed = self._timer.speed(len(sequence.sampled), self._engine.bytes_per_token)
        if self._forwards:
            speed = speed.side_by_side(self._tokens / self._forwards)
        logprobs = [token.logprob for token in sequence.sampled if token.logprob is not None]
        assert sequence.reason is not None
        return Generation(
            text="".join(token.text for token in tokens),
            ids=[token.id for token in tokens],
            finish_reason=sequence.reason,
            speed=speed,
            prompt_ids=self._request.prompt_ids,
            tokens=tokens,
            mean_logprob=sum(logprobs) / len(logprobs) if logprobs else None,
        )


def best_completions(completions: Sequence[Generation], count: int) -> list[Generation]:
    """The `count` completions with the highest mean log-probability per token, best first."""
    worst = -np.inf
    ranked = sorted(
        completions, key=lambda g: worst if g.mean_logprob is None else g.mean_logprob, reverse=True
    )
    return ranked[:count]
