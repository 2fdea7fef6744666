"""Live requests: their sequences, advanced by one engine step at a time, their counts and times."""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.expert_use import ExpertUse
from edgeinfer.engine.protocols import Engine, PromptSteps, TextTokenizer, next_step
from edgeinfer.generation.request import Request
from edgeinfer.results import FinishReason, Generation, Speed, Token
from edgeinfer.sampling import Sampler, logprobs
from edgeinfer.tokenizer.detokenizer import Detokenizer

if TYPE_CHECKING:
    from edgeinfer.generation.batching.paged_cache import PagedText
    from edgeinfer.generation.decoding import Decode
    from edgeinfer.speculation.speculator import Speculator

MAX_UNREAD = 256
"""Tokens that may wait for a slow reader before its sequence pauses."""
Phase = Literal["waiting", "reading", "decoding", "ended"]


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
        self.shifts = 0
        """Number of context shifts."""
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

    @property
    def is_plain(self) -> bool:
        """Whether only its sampler has to see the logits."""
        return self.request.logprobs is None and self.constraint is None

    def sample(self, logits: npt.NDArray[np.float32]) -> SampledToken:
        """Sample the next token from the logits after the last one."""
        token = self.sampler.sample(logits, self.ids)
        self.sampler.accept(token)
        return SampledToken(token, logits)

    def extend(self, sampled: Sequence[SampledToken], unread: deque[Token]) -> None:
        """Append the tokens of a step, up to the last one of the completion, and set its `reason` then. Those
        that can be emitted are appended to `unread`, too.
        """
        text, constraint, top_n = self._text, self.constraint, self.request.logprobs
        for count, token in enumerate(sampled, 1):
            if token.id in self._end_ids:
                self.reason = self._complete_reason()
                break
            self.ids.append(token.id)
            self.sampled.append(described(token, text.text_of(token.id), top_n))
            unread += text.push(self.sampled[-1])
            if text.stopped:
                self.reason = "stop"
            elif constraint is not None and count == len(sampled) and constraint.finished:
                self.reason = self._complete_reason()
            elif self.remaining == 0:
                self.reason = self._full_reason
            if self.reason is not None:
                break
        if self.reason is not None:
            unread += text.finish()

    def _complete_reason(self) -> FinishReason:
        """The finish reason of a completion that the model or its grammar has ended."""
        closed = self.constraint is not None and self.constraint.closed_early
        return self._full_reason if closed else "stop"


def described(sampled: SampledToken, text: str, top_n: int | None) -> Token:
    """The token with its log-probability and the `top_n` best ones if requested."""
    if top_n is None or sampled.logits is None:
        return Token(sampled.id, text, sampled.drafted)
    own, best = logprobs(sampled.logits, sampled.id, top_n)
    return Token(sampled.id, text, sampled.drafted, logprob=own, top_logprobs=best)


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

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that needn't be read."""
        return self._cached

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


@dataclass
class DraftCount:
    """Draft counters of one completion."""

    drafted: int = 0
    accepted: int = 0
    forwards: int = 0
    """Number of forwards with drafts."""
    tokens: int = 0
    """Number of tokens from these forwards."""

    @property
    def accepted_share(self) -> float | None:
        """Share of draft tokens that were accepted; None: there were none."""
        return self.accepted / self.drafted if self.drafted else None

    def add(self, drafted: int, accepted: int, tokens: int) -> None:
        """Add a forward with a draft that gave `tokens`."""
        self.drafted += drafted
        self.accepted += accepted
        self.forwards += 1
        self.tokens += tokens

    def add_forced(self, tokens: int, forwards: int) -> None:
        """Add `forwards` that gave `tokens` accepted draft tokens, and one token more."""
        self.drafted += tokens
        self.accepted += tokens
        self.forwards += forwards
        self.tokens += tokens + 1

    def tokens_per_forward(self, decoded: int) -> float:
        """Mean tokens per forward of a completion of `decoded` tokens; forwards without a draft give one."""
        return decoded / max(1, decoded - self.tokens + self.forwards)


class LiveRequest:
    """One request from its arrival to its end.

    A *pulled* request advances while its reader waits for a token, a *pushed* one (`on_change` is set) in
    each step. `phase`: "waiting" for a place in a cache, "reading" its prompt (or its tokens again), or
    "decoding".
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: TextTokenizer,
        request: Request,
        speculator: "Speculator | None" = None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        self.request = request
        self.sequence = GenerationSequence(request, tokenizer, engine.vocabulary_size, engine.context)
        self.speculator, self.drafts = speculator, DraftCount()
        self.timer, self.experts = GenerationTimer(), ExpertUse(engine)
        self.phase: Phase = "waiting"
        self.unread: deque[Token] = deque()
        self.error: Exception | None = None
        self.cancelled = False
        self.on_change = on_change
        self.is_awaited = False
        """Whether the reader of a pulled request waits for a token."""
        self.has_begun = False
        """Whether it has had a place in a cache."""
        self.is_alone = False
        """Whether it is the text of its engine, and no other request was live in its last step."""
        self.arrivals: Collection[LiveRequest] = ()
        """The requests that join the next step."""
        self.advances = False
        """Whether it takes part in the current step; else it has paused."""
        self.turn = 0
        """When a chunk of its prompt was read last, as the number of a step."""
        self.text: PagedText | None = None
        """Its pages in a paged cache."""
        self.engine: Engine | None = None
        """The engine whose text it is."""
        self.decode: Decode | None = None
        """How its engine decodes it."""
        self._steps: PromptSteps | None = None
        """The steps that are left of its prompt, on its engine, in chunks of at most `limit` tokens."""
        self._limit: int | None = None
        self._steps_total = 0
        self._batches = self._rows = 0
        self._bytes_per_token = engine.bytes_per_token

    @property
    def is_wanted(self) -> bool:
        """Whether it takes part in the next step."""
        if self.on_change is None:
            return self.is_awaited and not self.unread
        return len(self.unread) < MAX_UNREAD

    @property
    def ended(self) -> bool:
        return self.phase == "ended"

    @property
    def processed(self) -> int:
        """Number of its first tokens that its pages or its engine hold."""
        if self.text is not None:
            return self.text.length
        return 0 if self.engine is None else len(self.engine.ids)

    def start(self, held: int) -> None:
        """Begin to read its tokens, of which the cache holds `held`."""
        if not self.has_begun:
            self.timer.start(len(self.sequence.ids), held)
        self.has_begun, self.phase = True, "reading"

    def begin_steps(self, engine: Engine, limit: int | None = None) -> None:
        """Read what the engine doesn't hold of its tokens in chunks of at most `limit` tokens."""
        ids = self.sequence.ids[len(engine.ids) :]
        self._limit, self._steps_total = limit, len(ids)
        self._steps = engine.prompt_steps(ids, limit)

    def leave_engine(self) -> None:
        """It is no longer the text of its engine."""
        self.is_alone = False
        self.engine = self.decode = self._steps = None

    def engine_step(self, limit: int | None = None) -> None:
        """One step on its engine: the next chunk of its prompt, or its next tokens."""
        engine, decode = self.engine, self.decode
        assert engine is not None
        assert decode is not None
        if self.phase == "decoding":
            self.accept(decode.step([self.sequence])[0])
            return
        if self._steps is None or limit != self._limit:
            self.begin_steps(engine, limit)
        assert self._steps is not None
        self.sequence.sampler.begin()
        _, logits = next_step(self._steps, self._steps_total)
        self.progress(len(engine.ids))
        if logits is not None:
            self._steps = None
            self.first_token(logits)

    def step_alone(self) -> bool:
        """Its next tokens, without a step of the scheduler; False: it needs one. The caller has the lock."""
        if not self.is_alone or self.arrivals or self.phase != "decoding":
            return False
        self.timer.resume()
        try:
            self.engine_step()
        except Exception as error:
            self.fail(error)
        return True

    def progress(self, done: int) -> None:
        """Report that `done` of its tokens have been read."""
        if self.request.progress and not self.sequence.sampled:
            start = self.timer.cached_tokens
            self.request.progress(done - start, len(self.sequence.ids) - start)

    def first_token(self, logits: npt.NDArray[np.float32]) -> None:
        """Append the token after all tokens that have been read."""
        if not self.sequence.sampled:
            self.timer.prefilled()
        if self.sequence.reason is not None:  # no token is requested, or none fits
            self.phase = "ended"
            return
        self.phase = "decoding"
        self.accept([self.sequence.sample(logits)])

    def accept(self, sampled: list[SampledToken]) -> None:
        """Append the sampled tokens of a step."""
        self.timer.decoded(len(sampled))
        self.sequence.extend(sampled, self.unread)
        if self.sequence.reason is not None:
            self.phase = "ended"

    def batched(self, rows: int) -> None:
        """Count a forward that it shared with `rows` - 1 other sequences."""
        self._batches += 1
        self._rows += rows

    def fail(self, error: Exception) -> None:
        """End it with an error; its reader gets it after the unread tokens."""
        self.error, self.phase = error, "ended"

    def generation(self, tokens: list[Token]) -> Generation:
        """The completion with the tokens that its reader has taken."""
        sequence, request = self.sequence, self.request
        is_whole = self.ended and not self.unread and self.error is None
        reason: FinishReason | None = sequence.reason if is_whole else None
        logprobs = [token.logprob for token in tokens if token.logprob is not None]
        return Generation(
            text="".join(token.text for token in tokens),
            ids=[token.id for token in tokens],
            finish_reason=reason or "cancelled",
            speed=self._speed(len(tokens)),
            prompt_ids=request.prompt_ids,
            tokens=tokens,
            mean_logprob=sum(logprobs) / len(logprobs) if logprobs else None,
            dropped_messages=request.dropped_messages,
            context_shifts=sequence.shifts,
            evicted_tokens=sequence.evicted,
        )

    def _speed(self, generated: int) -> Speed:
        speed = self.timer.speed(generated, self._bytes_per_token)
        speed = replace(speed, gpu_experts=self.experts.gpu_share)
        if self._batches:
            share = self.drafts.accepted_share
            return replace(speed, accepted_share=share, tokens_per_forward=self._rows / self._batches)
        if not self.drafts.drafted:
            return speed
        controller = self.speculator.controller_of(self.request.sampling) if self.speculator else None
        baseline = controller.costs.baseline if controller else None
        return replace(
            speed,
            accepted_share=self.drafts.accepted_share,
            tokens_per_forward=self.drafts.tokens_per_forward(self.timer.decoded_tokens),
            speculation_gain=baseline * speed.decode_tokens_per_second if baseline else None,
        )
