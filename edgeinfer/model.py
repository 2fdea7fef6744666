"""A loaded model: text in, text out."""

import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, Self, overload

import numpy as np
import numpy.typing as npt

from edgeinfer.answer_counts import AnswerCounts
from edgeinfer.chat.chat_format import ChatFormat
from edgeinfer.decoding import Request, TokenStream, context_overflow
from edgeinfer.errors import EdgeInferError, SettingError
from edgeinfer.language_model import Engine, Progress, TextTokenizer
from edgeinfer.results import Generation
from edgeinfer.sampling import SamplerSettings
from edgeinfer.session import Chat, ChatEngine, Message
from edgeinfer.speculation.drafts import Drafter
from edgeinfer.speculation.speculator import Speculator
from edgeinfer_offload.memory_plan import MemoryPlan


class Model:
    """What `edgeinfer.load` returns; a context manager. Safe to use from several threads.

    `notes` are one-line remarks on how it was loaded, worth showing to a person.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        tokenizer: TextTokenizer,
        chat_format: ChatFormat | None,
        plan: Callable[[], MemoryPlan] | None = None,
        prompt_style: Literal["raw", "chat"] | None = None,
        notes: Sequence[str] = (),
        on_close: Callable[[], None] | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.name = name
        self.engine = engine
        self.tokenizer = tokenizer
        self.chat_format = chat_format
        self._plan = plan
        self.prompt_style = prompt_style
        self.notes = tuple(notes)
        self._on_close = on_close
        self._speculator = Speculator(engine, drafter) if drafter else None
        self._turn = threading.Lock()
        self._closed = False

    @cached_property
    def plan(self) -> MemoryPlan | None:
        """Where its bytes lie and what reading them costs; None where another engine decides that."""
        return self._plan() if self._plan else None

    @property
    def context(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.engine.context

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        n: None = None,
        best_of: int | None = None,
        beams: int | None = None,
        **settings: Any,
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        n: int,
        best_of: int | None = None,
        beams: int | None = None,
        **settings: Any,
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        n: int | None = None,
        best_of: int | None = None,
        beams: int | None = None,
        **settings: Any,
    ) -> Generation | list[Generation]:
        """The whole answer to a prompt, or a list of `n` answers; settings and `Raises` as for `stream`.

        Several answers share the prompt's keys and values and are read side by side; with a seed, answer i
        is that of seed + i. `best_of`: so many are drawn, and of these the `n` (or the one) that the model
        itself finds most probable, token for token, are given. `beams`: no draws, but a search for the most
        probable answers; `stop` isn't for these.
        """
        if n is None and best_of is None and beams is None:
            stream = self.stream(prompt, **settings)
            for _ in stream:
                pass
            return stream.result
        counts = AnswerCounts(n, best_of, beams)
        answers = self._several(prompt, counts, **settings)
        return answers[0] if n is None else answers

    def _several(
        self,
        prompt: str | Sequence[int],
        counts: AnswerCounts,
        *,
        raw: bool = True,
        system: str | None = None,
        **settings: Any,
    ) -> list[Generation]:
        ids = self._prompt_ids(prompt, raw, system)
        self._refuse_closed()
        request = _request(ids, **settings)
        with self._turn:
            return counts.answers(self.engine, self.tokenizer, request)

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: str | Iterable[str] | None = None,
        logprobs: int | None = None,
        raw: bool = True,
        system: str | None = None,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> TokenStream:
        """The answer to a prompt as it comes.

        `prompt`: a text, or token ids taken as they are. `raw` False puts a text into the chat template, and
        `system` before it.
        `max_tokens` None: until the model ends or the context is full. `stop`: texts that end the answer.
        `logprobs` n: every token bears its log-probability and those of the n best. `progress` hears of
        the prompt's tokens read. `sampling`: the fields of `SamplerSettings`.

        Raises:
            SettingError: a setting or token id out of its range, or `raw` False without a chat template.
            ChatTemplateError: the chat template fails.
            EdgeInferError: the model has been closed.
            ContextOverflowError: the prompt is longer than the context; raised by the first token.
        """
        return self._stream_ids(
            self._prompt_ids(prompt, raw, system),
            max_tokens=max_tokens,
            stop=stop,
            logprobs=logprobs,
            progress=progress,
            **sampling,
        )

    def _prompt_ids(self, prompt: str | Sequence[int], raw: bool, system: str | None) -> list[int]:
        if system is not None and (raw or not isinstance(prompt, str)):
            raise SettingError("system: it goes into the chat template; give a text, and raw=False")
        if not isinstance(prompt, str):
            return self._checked(prompt)
        if raw:
            return self._encode_text(prompt)
        told = [{"role": "system", "content": system}] if system is not None else []
        return self._encode_chat([*told, {"role": "user", "content": prompt}])

    def _stream_ids(
        self, ids: list[int], *, on_end: Callable[[Generation], None] | None = None, **settings: Any
    ) -> TokenStream:
        self._refuse_closed()
        request = _request(ids, **settings)
        return TokenStream(self.engine, self.tokenizer, request, self._turn, on_end, self._speculator)

    def measure_drafting(self) -> None:
        """Time what decides whether drafts pay, once, before the first answer: some tenth of a second."""
        if self._speculator:
            self._speculator.measure()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EdgeInferError(f"{self.name} has been closed; load it again")

    def _checked(self, ids: Sequence[int]) -> list[int]:
        size = self.engine.vocabulary_size
        try:
            if isinstance(ids, bytes | bytearray):
                raise TypeError
            taken = [operator.index(i) for i in ids]
        except TypeError:
            raise SettingError(
                f"prompt: saw {type(ids).__name__} {str(ids)[:40]!r}, wanted a text or whole numbers"
            ) from None
        wrong = [i for i in taken if not 0 <= i < size]
        if wrong:
            raise SettingError(f"prompt: saw token id {wrong[0]}, wanted 0 to {size - 1}")
        return taken

    def _encode_text(self, text: str) -> list[int]:
        """A text to continue: with BOS where the file wants it, never with the EOS that would end it."""
        ids, bos = self.tokenizer.encode(text), self.tokenizer.bos_id
        if bos is not None and (self.tokenizer.add_bos or not ids):
            return [bos, *ids]
        return ids

    def _encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Messages through the template; BOS is added only if the template didn't write it."""
        if self.chat_format is None:
            raise SettingError(
                f"{self.name}: the file holds no chat template; give one with --chat-template FILE "
                "(chat_template=)"
            )
        text = self.chat_format.render(messages)
        ids = self.tokenizer.encode(text, special=True)
        bos = self.tokenizer.bos_id
        if self.tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    def chat(self, system: str | None = None, **settings: Any) -> Chat:
        """A conversation; `settings` are defaults for all its answers, those of `stream` but `raw`."""
        return Chat(ChatEngine(self._encode_chat, self._stream_ids, self.context), system, **settings)

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits (len(ids), vocabulary) float32 behind each token of `ids`, read from the beginning.

        Raises:
            SettingError: a token id that the vocabulary doesn't hold, or none at all.
            ContextOverflowError: more ids than the context holds.
            EdgeInferError: the model has been closed.
        """
        taken = self._checked(ids)
        if not taken:
            raise SettingError("ids: saw none, wanted at least one token id")
        with self._turn:
            self._refuse_closed()
            if len(taken) > self.context:
                raise context_overflow(self.engine, len(taken))
            self.engine.rewind(0)
            return self.engine.append_all(taken)

    def close(self) -> None:
        """Give back threads, memory and the file, once the token in progress is done. May be called twice;
        a stream that goes on afterwards meets an `EdgeInferError`.
        """
        with self._turn:
            if self._closed:
                return
            self._closed = True
            self.engine.close()
            if self._speculator:
                self._speculator.close()
            if self._on_close:
                self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _request(
    ids: list[int],
    *,
    max_tokens: int | None = None,
    stop: str | Iterable[str] | None = None,
    logprobs: int | None = None,
    progress: Progress | None = None,
    dropped_turns: int = 0,
    **sampling: Any,
) -> Request:
    return Request(
        prompt_ids=ids,
        sampling=SamplerSettings.from_fields(sampling),
        max_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        logprobs=logprobs,
        progress=progress,
        dropped_turns=dropped_turns,
    )
