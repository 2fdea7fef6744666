"""The generation loop: the sequences of a request, advanced by one engine step at a time, and timed."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.protocols import TextTokenizer
from edgeinfer.generation.request import Request
from edgeinfer.results import FinishReason, Speed, Token
from edgeinfer.sampling import Sampler, logprobs
from edgeinfer.tokenizer.detokenizer import Detokenizer


class SampledToken(NamedTuple):
    """A sampled token, and the logits from which it was sampled if they were copied to the host."""

    id: int
    logits: npt.NDArray[np.float32] | None
    drafted: bool = False


class GenerationSequence:
    """A prompt and its completion so far. `constraint` of the request: the allowed tokens, used up by this
    sequence. `context`: tokens that the KV cache holds.
    """

    def __init__(
        self, request: Request, tokenizer: TextTokenizer, vocabulary_size: int, context: int
    ) -> None:
        self.request = request
        self.constraint = request.constraint
        self.sampler = Sampler(request.sampling, vocabulary_size, tokenizer.token_bytes, self.constraint)
        self.ids = list(request.prompt_ids)
        """The prompt and the completion, without tokens that a context shift has evicted."""
        self.evicted = 0
        """Number of tokens that context shift has evicted, or left out of the prompt."""
        self.max_tokens = request.max_new_tokens(context)
        self.sampled: list[Token] = []
        """The sampled tokens, without the end token; their text may still be incomplete."""
        self.reason: FinishReason | None = None
        self._end_ids = tokenizer.end_ids
        self._text = Detokenizer(tokenizer.stream_decoder(), request.stop)
        self._full_reason = request.full_reason(context)
        if self.constraint is not None:
            self.constraint.limit(self.max_tokens)
        if self.max_tokens == 0:
            self.reason = self._full_reason

    @property
    def remaining(self) -> int:
        """Maximum number of further tokens."""
        return self.max_tokens - len(self.sampled)

    def sample(self, logits: npt.NDArray[np.float32]) -> SampledToken:
        """Sample the next token from the logits after the last one."""
        token = self.sampler.sample(logits, self.ids)
        self.sampler.accept(token)
        return SampledToken(token, logits)

    def append(self, sampled: SampledToken, is_last: bool = True) -> list[Token]:
        """Append a token and set `reason` if it is the last one. Returns the tokens that can be emitted.

        `is_last`: no further sampled token follows from the same step.
        """
        constraint = self.constraint
        if sampled.id in self._end_ids:
            self.reason = self._complete_reason()
            return []
        self.ids.append(sampled.id)
        token = described(sampled, self.request.logprobs)
        self.sampled.append(token)
        emitted = self._text.push(token)
        if self._text.stopped:
            self.reason = "stop"
        elif constraint is not None and is_last and constraint.finished:
            self.reason = self._complete_reason()
        elif self.remaining == 0:
            self.reason = self._full_reason
        return emitted

    def finish(self) -> list[Token]:
        """The tokens whose text was incomplete until the end."""
        return self._text.finish()

    def _complete_reason(self) -> FinishReason:
        """The finish reason of a completion that the model or its grammar has ended."""
        closed = self.constraint is not None and self.constraint.closed_early
        return self._full_reason if closed else "stop"


def described(sampled: SampledToken, top_n: int | None) -> Token:
    """The token without its text, with its log-probability and the `top_n` best ones if requested."""
    if top_n is None or sampled.logits is None:
        return Token(sampled.id, "", sampled.drafted)
    own, best = logprobs(sampled.logits, sampled.id, top_n)
    return Token(sampled.id, "", sampled.drafted, logprob=own, top_logprobs=best)


class GenerationTimer:
    """Times the phases of one completion, or of a batch; time that the caller spends between tokens
    is excluded.
    """

    def __init__(self) -> None:
        self._prompt_tokens = self._cached = self._sampled = 0
        self._prefill_seconds = self._first_seconds = self._decode_seconds = 0.0
        self._since = 0.0

    def start(self, prompt_tokens: int, cached: int) -> None:
        self._prompt_tokens, self._cached = prompt_tokens, cached
        self._since = time.perf_counter()

    def prefilled(self) -> None:
        self._prefill_seconds = time.perf_counter() - self._since

    def resume(self) -> None:
        """Start timing the next token."""
        self._since = time.perf_counter()

    def decoded(self, tokens: int = 1) -> None:
        """Count `tokens` sampled tokens."""
        seconds = time.perf_counter() - self._since
        if self._sampled:
            self._decode_seconds += seconds
        else:
            self._first_seconds = seconds
        self._sampled += tokens

    @property
    def decoded_tokens(self) -> int:
        """Tokens after the first, which prefill produced."""
        return max(0, self._sampled - 1)

    def speed(self, generated: int, bytes_per_token: int) -> Speed:
        """The speeds. `generated`: tokens of the completion, without the end token."""
        prefill, decode = self._prefill_seconds, self._decode_seconds
        rate = self.decoded_tokens / decode if decode > 0 else 0.0
        return Speed(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached,
            generated_tokens=generated,
            seconds_to_first_token=self._first_seconds,
            prompt_tokens_per_second=(self._prompt_tokens - self._cached) / prefill if prefill > 0 else 0.0,
            decode_tokens_per_second=rate,
            gigabytes_per_second=rate * bytes_per_token / 1e9,
        )


class Decode(Protocol):
    """How an engine step is made; chosen at the start of a request."""

    def step(self, sequences: Sequence[GenerationSequence]) -> list[list[SampledToken]]:
        """One engine step: the next tokens of each sequence, which its sampler has accepted; none for a
        sequence that has to wait.
        """
        ...


class GenerationLoop:
    """The sequences of one request, and how they are decoded."""

    def __init__(
        self, sequences: Sequence[GenerationSequence], decode: Decode, timer: GenerationTimer
    ) -> None:
        self.live = list(sequences)
        self._decode = decode
        self._timer = timer

    def step(self) -> Iterator[tuple[GenerationSequence, Token]]:
        """One engine step; yields the tokens that can be emitted. `live`: the unfinished sequences."""
        self._timer.resume()
        sampled = self._decode.step(self.live)
        self._timer.decoded(sum(map(len, sampled)))
        yield from self.append(sampled)

    def append(
        self, new_tokens: Sequence[Sequence[SampledToken]]
    ) -> Iterator[tuple[GenerationSequence, Token]]:
        """Append sampled tokens to the live sequences; yields the tokens that can be emitted."""
        for sequence, sampled in zip(self.live, new_tokens, strict=True):
            for index, token in enumerate(sampled):
                for emitted in sequence.append(token, index + 1 == len(sampled)):
                    yield sequence, emitted
                if sequence.reason is not None:
                    break
            if sequence.reason is not None:
                for emitted in sequence.finish():
                    yield sequence, emitted
        self.live = [sequence for sequence in self.live if sequence.reason is None]
