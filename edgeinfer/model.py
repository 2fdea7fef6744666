"""A loaded model: text in, text out."""

import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

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

    def generate(self, prompt: str | Sequence[int], **settings: Any) -> Generation:
        """The whole answer to a prompt; settings and `Raises` as for `stream`."""
        stream = self.stream(prompt, **settings)
        for _ in stream:
            pass
        return stream.result

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: str | Iterable[str] | None = None,
        logprobs: int | None = None,
        raw: bool = True,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> TokenStream:
        """The answer to a prompt as it comes.

        `prompt`: a text, or token ids taken as they are. `raw` False puts a text into the chat template.
        `max_tokens` None: until the model ends or the context is full. `stop`: texts that end the answer.
        `logprobs` n: every token bears its log-probability and those of the n best. `progress` hears of
        the prompt's tokens read. `sampling`: the fields of `SamplerSettings`.

        Raises:
            SettingError: a setting or token id out of its range, or `raw` False without a chat template.
            ChatTemplateError: the chat template fails.
            EdgeInferError: the model has been closed.
            ContextOverflowError: the prompt is longer than the context; raised by the first token.
        """
        if not isinstance(prompt, str):
            ids = self._checked(prompt)
        elif raw:
            ids = self._encode_text(prompt)
        else:
            ids = self._encode_chat([{"role": "user", "content": prompt}])
        return self._stream_ids(
            ids, max_tokens=max_tokens, stop=stop, logprobs=logprobs, progress=progress, **sampling
        )

    def _stream_ids(
        self,
        ids: list[int],
        *,
        max_tokens: int | None = None,
        stop: str | Iterable[str] | None = None,
        logprobs: int | None = None,
        progress: Progress | None = None,
        dropped_turns: int = 0,
        on_end: Callable[[Generation], None] | None = None,
        **sampling: Any,
    ) -> TokenStream:
        self._refuse_closed()
        request = Request(
            prompt_ids=ids,
            sampling=SamplerSettings.from_fields(sampling),
            max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            logprobs=logprobs,
            progress=progress,
            dropped_turns=dropped_turns,
        )
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
