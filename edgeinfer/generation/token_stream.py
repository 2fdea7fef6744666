"""The token stream of a completion, which the caller reads token by token."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.expert_use import ExpertUse
from edgeinfer.engine.guards import ModelLock
from edgeinfer.engine.protocols import Engine, TextTokenizer
from edgeinfer.generation.decoding import ContextShiftDecode, decode_for
from edgeinfer.generation.loop import GenerationLoop, GenerationSequence, GenerationTimer
from edgeinfer.generation.prefill import read_prompt
from edgeinfer.generation.request import Request
from edgeinfer.results import FinishReason, Generation, Speed, Token
from edgeinfer.speculation.speculator import DraftCount, Speculator
from edgeinfer_kernels.system.locks import fork_safe_lock


class _Cancelled(Exception):  # noqa: N818 - no error: the caller has requested it
    """Aborts a prefill after cancellation."""


class TokenStream:
    """An iterator of tokens; `result` is the completion so far, or the whole one at the end.

    A `KeyboardInterrupt` or `cancel()` ends it with finish reason "cancelled"; the model stays usable.
    Several streams of one model can be read alternately, and by several threads: `lock` is the model's.
    `on_end` is called once with the completion, however it ended. `batch_invariant`: as for `decode_for`.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: TextTokenizer,
        request: Request,
        lock: ModelLock,
        on_end: Callable[[Generation], None] | None = None,
        speculator: Speculator | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self._engine = engine
        self._lock = lock
        self._tokenizer = tokenizer
        self._request = request
        self._on_end = on_end
        self._timer = GenerationTimer()
        self._experts = ExpertUse(engine)
        self._speculator = speculator
        self._batch_invariant = batch_invariant
        self._drafts = DraftCount()
        self._shift: ContextShiftDecode | None = None
        self._sequence: GenerationSequence | None = None
        self._tokens: list[Token] = []
        self._reason: FinishReason = "cancelled"
        self._cancelled = False
        self._ending = fork_safe_lock()
        self._ended = False
        self._produced = self._produce()

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        try:
            with self._lock:
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
            dropped_messages=self._request.dropped_messages,
            context_shifts=self._shift.shifts if self._shift else 0,
            evicted_tokens=self._sequence.evicted if self._sequence else 0,
        )

    def _speed(self) -> Speed:
        speed = self._timer.speed(len(self._tokens), self._engine.bytes_per_token)
        speed = replace(speed, gpu_experts=self._experts.gpu_share)
        if not self._drafts.drafted:
            return speed
        speculator = self._speculator
        controller = speculator.controller_of(self._request.sampling) if speculator else None
        baseline = controller.costs.baseline if controller else None
        return replace(
            speed,
            accepted_share=self._drafts.accepted_share,
            tokens_per_forward=self._drafts.tokens_per_forward(self._timer.decoded_tokens),
            speculation_gain=baseline * speed.decode_tokens_per_second if baseline else None,
        )

    def _progress(self, done: int, total: int) -> None:
        if self._request.progress:
            self._request.progress(done, total)
        if self._cancelled:
            raise _Cancelled

    def _produce(self) -> Generator[Token, None, None]:
        engine, request = self._engine, self._request
        sequence = GenerationSequence(request, self._tokenizer, engine.vocabulary_size, engine.context)
        self._sequence = sequence
        decode = decode_for(
            sequence, engine, self._tokenizer, self._speculator, self._drafts, self._batch_invariant
        )
        if request.context_shift is not None:
            decode = self._shift = ContextShiftDecode(engine, request.context_shift, decode)
        loop = GenerationLoop([sequence], decode, self._timer)
        sequence.sampler.begin()
        logits = self._prefill(sequence)
        if sequence.reason is None:
            first = sequence.sample(logits)
            self._timer.decoded()
            yield from (token for _, token in loop.append([[first]]))
            while loop.live:
                yield from (token for _, token in loop.step())
        self._reason = sequence.reason or self._reason

    def _prefill(self, sequence: GenerationSequence) -> npt.NDArray[np.float32]:
        """Logits after the prompt, of which `sequence` then has the cached tokens; aborts if the stream is
        cancelled.
        """
        request = replace(self._request, progress=self._progress)
        if request.context_shift is not None:
            sequence.ids = request.context_shift.begin(self._engine, request.prompt_ids)
            sequence.evicted = len(request.prompt_ids) - len(sequence.ids)
            request = replace(request, prompt_ids=list(sequence.ids))
        return read_prompt(self._engine, request, self._timer, sequence.evicted > 0)
