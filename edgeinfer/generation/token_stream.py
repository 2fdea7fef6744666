"""The token stream of a completion: prefill, sampling, detokenizing, stopping."""

import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.expert_use import ExpertUse
from edgeinfer.engine.model_lock import ModelLock
from edgeinfer.engine.protocols import Engine, Progress, TextTokenizer, TokenSampler
from edgeinfer.errors import ContextOverflowError, SettingError
from edgeinfer.generation.context_shift import ContextShift, shared_with
from edgeinfer.generation.detokenizer import Detokenizer
from edgeinfer.generation.sampled_token import SampledToken
from edgeinfer.generation.timer import GenerationTimer
from edgeinfer.results import FinishReason, Generation, Speed, Token
from edgeinfer.sampling import Sampler, SamplerSettings, logprobs
from edgeinfer.shown import shown
from edgeinfer.speculation.draft_costs import MAX_DRAFTED
from edgeinfer.speculation.speculator import DraftCount, Speculator
from edgeinfer.structured.constraint import Constraint
from edgeinfer.structured.forced_tokens import ForcedTokens
from edgeinfer_kernels.system.fork_locks import fork_safe_lock


@dataclass(frozen=True)
class Request:
    """The request for one completion. `max_tokens` None: until the model ends or the context is full."""

    prompt_ids: list[int]
    sampling: SamplerSettings
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """None: no logprobs; n: of each sampled token and of the n best."""
    progress: Progress | None = None
    dropped_turns: int = 0
    constraint: Constraint | None = None
    """The allowed tokens; used up by this completion."""
    recall: "Recall | None" = None
    sliding: ContextShift | None = None
    """The context shift policy; None: generation stops when the context is full."""

    def __post_init__(self) -> None:
        check_count("max_tokens", self.max_tokens)
        check_count("logprobs", self.logprobs)
        if self.progress is not None and not callable(self.progress):
            raise SettingError(
                f"progress: saw {shown(self.progress)}, wanted a function (done, total), or None"
            )
        for text in self.stop:
            if not isinstance(text, str):
                raise SettingError(f"stop: saw {shown(text)}, wanted a text, or a list of texts")

    def most_tokens(self, context: int) -> int:
        """Maximum number of tokens of the completion in a context of `context` tokens."""
        room = sys.maxsize if self.sliding else context - len(self.prompt_ids)
        return room if self.max_tokens is None else min(room, self.max_tokens)

    def full_reason(self, context: int) -> FinishReason:
        """The finish reason of a completion with `most_tokens` tokens."""
        return "length" if self.most_tokens(context) == self.max_tokens else "context"


def check_count(name: str, value: object) -> None:
    """Raise `SettingError` unless `value` is an integer of at least 0, or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise SettingError(f"{name}: saw {shown(value)}, wanted a whole number of at least 0, or None")


class _Cancelled(Exception):  # noqa: N818 - no error: somebody has asked for it
    """Aborts a prefill after cancellation."""


class TokenStream:
    """An iterator of tokens; `result` is the completion so far, or the whole one at the end.

    A `KeyboardInterrupt` or `cancel()` ends it with finish reason "cancelled"; the model stays usable.
    Several streams of one model can be read alternately, and by several threads: `turn` is the model's lock.
    `on_end` is called once with the completion, however it ended. `batch_invariant`: logits of several tokens
    processed in one step are bit-identical to those processed one by one.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: TextTokenizer,
        request: Request,
        turn: ModelLock,
        on_end: Callable[[Generation], None] | None = None,
        speculator: Speculator | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self._engine = engine
        self._turn = turn
        self._tokenizer = tokenizer
        self._request = request
        self._on_end = on_end
        self._clock = GenerationTimer()
        self._experts = ExpertUse(engine)
        self._speculator = speculator
        self._pace = speculator.pace_of(request.sampling) if speculator else None
        self._drafts = DraftCount()
        together = 1 + MAX_DRAFTED if batch_invariant or speculator else 1
        self._certain = ForcedTokens(engine, together, self._drafts)
        self._tokens: list[Token] = []
        self._slides = self._left_out = 0
        self._reason: FinishReason = "cancelled"
        self._cancelled = False
        self._ending = fork_safe_lock()
        self._ended = False
        self._produced = self._produce()

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        try:
            with self._turn:
                if self._cancelled:
                    self._produced.close()
                token = next(self._produced)
        except _Cancelled:
            self._end()
            raise StopIteration from None
        except BaseException:
            self._end()
            raise
        self._tokens.append(token)
        return token

    def cancel(self) -> None:
        """Stop here; the text so far remains. Another thread that reads the stream gets the token (or
        finishes the prompt part) that is being computed, and then the end.
        """
        self._cancelled = True
        try:
            self._produced.close()
        except ValueError:  # a token is being computed: its reader ends the stream
            return
        self._end()

    def _end(self) -> None:
        with self._ending:
            first, self._ended = not self._ended, True
        if first and self._on_end:
            self._on_end(self.result)

    @property
    def result(self) -> Generation:
        """The completion so far."""
        return Generation(
            text="".join(token.text for token in self._tokens),
            ids=[token.id for token in self._tokens],
            finish_reason=self._reason,
            speed=self._speed(),
            prompt_ids=self._request.prompt_ids,
            tokens=list(self._tokens),
            dropped_turns=self._request.dropped_turns,
            slides=self._slides,
            left_out_tokens=self._left_out,
        )

    def _speed(self) -> Speed:
        speed = self._clock.speed(len(self._tokens), self._engine.bytes_per_token)
        speed = replace(speed, gpu_experts=self._experts.gpu_share)
        if not self._drafts.drafted:
            return speed
        plain = self._pace.costs.plain if self._pace else None
        return replace(
            speed,
            accepted_share=self._drafts.accepted_share,
            tokens_per_pass=self._drafts.tokens_per_pass(self._clock.decoded_tokens),
            speculation_gain=plain * speed.decode_tokens_per_second if plain else None,
        )

    def _prefill(self) -> tuple[npt.NDArray[np.float32], list[int]]:
        """Logits after the prompt, and the prompt tokens that are cached; aborts if the stream is
        cancelled.
        """
        request = replace(self._request, progress=self._progress)
        if request.sliding is not None:
            held = request.sliding.begin(self._engine, request.prompt_ids)
            self._left_out = len(request.prompt_ids) - len(held)
            request = replace(request, prompt_ids=held)
        return read_prompt(self._engine, request, self._clock, self._left_out > 0), list(request.prompt_ids)

    def _slid(self, history: list[int]) -> list[int]:
        """The history for the next token: with a part of its middle evicted if the context is full."""
        sliding, engine = self._request.sliding, self._engine
        if sliding is None or len(history) <= engine.context:
            return history
        kept = sliding.shorten(engine, history)
        self._slides += 1
        self._left_out += len(history) - len(kept)
        return kept

    def _progress(self, done: int, total: int) -> None:
        if self._request.progress:
            self._request.progress(done, total)
        if self._cancelled:
            raise _Cancelled

    def _produce(self) -> Generator[Token, None, None]:
        request, engine = self._request, self._engine
        constraint = request.constraint
        sampler = Sampler(request.sampling, engine.vocabulary_size, self._tokenizer.token_bytes, constraint)
        text = Detokenizer(self._tokenizer, request.stop)
        plain = request.logprobs is None and constraint is None
        chooser = engine.choice(sampler) if plain else None
        sampler.begin()
        prompt_logits, history = self._prefill()
        most = request.most_tokens(engine.context)
        if constraint:
            constraint.limit(most)
        if most == 0:
            self._reason = request.full_reason(engine.context)
            return
        first = sampler.sample(prompt_logits, history)
        sampler.accept(first)
        self._clock.decoded()
        ready: deque[SampledToken] = deque([SampledToken(first, prompt_logits)])
        for count in range(1, most + 1):
            if not ready:
                self._clock.resume()
                history = self._slid(history)
                ready.extend(self._next(history, sampler, chooser, most - count))
                self._clock.decoded(len(ready))
            chosen = ready.popleft()
            if chosen.id in self._tokenizer.end_ids:
                self._reason = self._complete_reason()
                break
            history.append(chosen.id)
            yield from text.push(self._described(chosen))
            if text.stopped or (constraint and not ready and constraint.finished):
                self._reason = "stop" if text.stopped else self._complete_reason()
                break
            if count == most:
                self._reason = request.full_reason(engine.context)
                break
        yield from text.finish()

    def _complete_reason(self) -> FinishReason:
        """The finish reason of a completion that the model or its grammar has ended."""
        closed = self._request.constraint is not None and self._request.constraint.closed_early
        return self._request.full_reason(self._engine.context) if closed else "stop"

    def _next(
        self, history: list[int], sampler: Sampler, chooser: TokenSampler | None, room: int
    ) -> list[SampledToken]:
        """The tokens after `history`, from one to 1 + `room`; the sampler has accepted them."""
        engine, speculator, pace = self._engine, self._speculator, self._pace
        follows = engine.ids == history[: len(history) - 1 - self._certain.unread]
        constraint = self._request.constraint
        if constraint and self._request.logprobs is None:  # logprobs need the logits after each
            most = min(1 + room, engine.context - len(history))
            if certain := self._certain.choose(constraint, sampler, most):
                return certain
        if constraint or not speculator or not pace or not follows:
            return [self._one(history, sampler, chooser, follows)]
        if pace.rest:
            pace.rest -= 1
            return [self._one(history, sampler, chooser, follows, ahead=pace.rest > 0)]
        draft = speculator.draft(history, sampler, room)
        if draft.ids:
            end_ids = self._tokenizer.end_ids
            return speculator.read(draft, history, sampler, end_ids, self._drafts)
        begin = time.perf_counter()
        # A step that the device starts ahead would delay a draft.
        chosen = self._one(history, sampler, chooser, follows, ahead=pace.costs.times_plain)
        speculator.plain(sampler, time.perf_counter() - begin)
        return [chosen]

    def _one(
        self,
        history: list[int],
        sampler: Sampler,
        chooser: TokenSampler | None,
        follows: bool,
        ahead: bool = True,
    ) -> SampledToken:
        """The token after `history`, without drafting.

        If another stream has used the cache in between (`follows` False), more than one token is processed.
        `ahead`: the token after it is expected to be requested in the same way.
        """
        engine, unread, self._certain.unread = self._engine, self._certain.unread, 0
        held = len(history) - 1 - unread
        if not follows:
            held = min(shared_with(engine, history, self._left_out > 0), len(history) - 1)
            engine.rewind(held)
        elif chooser and (taken := chooser.next(history, ahead)) is not None:
            sampler.accept(taken)
            return SampledToken(taken, None)
        sampler.begin()
        read = self._certain.read if follows else engine.append
        logits = read(history[held:])
        chosen = sampler.sample(logits, history)
        sampler.accept(chosen)
        return SampledToken(chosen, logits)

    def _described(self, chosen: SampledToken) -> Token:
        return described(chosen, self._request.logprobs)


def described(chosen: SampledToken, wanted: int | None) -> Token:
    """The token without its text, with its log-probability and the `wanted` best ones if requested."""
    if wanted is None or chosen.logits is None:
        return Token(chosen.id, "", chosen.drafted)
    own, best = logprobs(chosen.logits, chosen.id, wanted)
    return Token(chosen.id, "", chosen.drafted, logprob=own, top_logprobs=best)


Recall = Callable[[list[int], int], int]
"""(ids, number of cached ones) -> number of cached ones now; larger if a prompt cache was restored."""


def rewind_to_shared(
    engine: Engine, ids: Sequence[int], recall: Recall | None = None, slid: bool = False
) -> int:
    """Truncate the cache to its common prefix with a prompt, except the last token; returns its length.

    `slid`: `ids` is the rest of a longer text after context shift.

    Raises:
        SettingError: the prompt is empty.
        ContextOverflowError: it is longer than the context.
    """
    if not ids:
        raise SettingError("the prompt is empty, and this model has no token to begin with; give it a text")
    if len(ids) > engine.context:
        raise context_overflow(engine, len(ids))
    shared = min(shared_with(engine, ids, slid), len(ids) - 1)
    if recall is not None:
        shared = recall(list(ids[:-1]), shared)
    engine.rewind(shared)
    return shared


def read_prompt(
    engine: Engine, request: Request, clock: GenerationTimer, slid: bool = False
) -> npt.NDArray[np.float32]:
    """Prefill the uncached part of the prompt; returns the logits after its last token, (vocabulary,).

    Raises the errors of `rewind_to_shared`.
    """
    shared = rewind_to_shared(engine, request.prompt_ids, request.recall, slid)
    clock.start(len(request.prompt_ids), shared)
    logits = engine.append(request.prompt_ids[shared:], request.progress)
    clock.prefilled()
    return logits


def context_overflow(engine: Engine, count: int) -> ContextOverflowError:
    """The error for a prompt of `count` tokens, which is more than the context."""
    if engine.largest_context > engine.context:
        way_out = f"up to {engine.largest_context} the model was trained for and fits this machine"
    else:
        way_out = "the model wasn't trained for more, or this machine's memory doesn't hold it"
    return ContextOverflowError(
        f"the prompt has {count} tokens, the context holds {engine.context}; shorten it, or take a larger "
        f"context (--context, context=): {way_out}"
    )
