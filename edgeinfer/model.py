"""A loaded model: text in, text out."""

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from edgeinfer.chat_format import ChatFormat
from edgeinfer.decoding import Request, TokenStream
from edgeinfer.errors import EdgeInferError, SettingError
from edgeinfer.language_model import Engine, Progress, TextTokenizer
from edgeinfer.results import Generation
from edgeinfer.sampling import SamplerSettings
from edgeinfer.session import Chat, ChatEngine, Message
from edgeinfer_offload.plan import MemoryPlan


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
    ) -> None:
        self.name = name
        self.engine = engine
        self.tokenizer = tokenizer
        self.chat_format = chat_format
        self._plan = plan
        self.prompt_style = prompt_style
        self.notes = tuple(notes)
        self._on_close = on_close
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
        """The whole answer to a prompt; settings as for `stream`."""
        stream = self.stream(prompt, **settings)
        for _ in stream:
            pass
        return stream.result

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: str | Iterable[str] = (),
        logprobs: int | None = None,
        raw: bool = True,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> TokenStream:
        """The answer to a prompt as it comes.

        `prompt`: a text, or token ids taken as they are. `raw` False puts a text into the chat template.
        `stop`: texts that end the answer. `logprobs` n: every token bears its log-probability and those of
        the n best. `sampling`: the fields of `SamplerSettings`.

        Raises `ContextOverflowError`, `SettingError`, `ChatTemplateError`.
        """
        if isinstance(prompt, str):
            ids = (
                self._encode_text(prompt) if raw else self._encode_chat([{"role": "user", "content": prompt}])
            )
        else:
            ids = self._checked(prompt)
        return self._stream_ids(
            ids, max_tokens=max_tokens, stop=stop, logprobs=logprobs, progress=progress, **sampling
        )

    def _stream_ids(
        self,
        ids: list[int],
        *,
        max_tokens: int | None = None,
        stop: str | Iterable[str] = (),
        logprobs: int | None = None,
        progress: Progress | None = None,
        dropped_turns: int = 0,
        on_end: Callable[[Generation], None] | None = None,
        **sampling: Any,
    ) -> TokenStream:
        if self._closed:
            raise EdgeInferError(f"{self.name} has been closed; load it again")
        request = Request(
            prompt_ids=ids,
            sampling=SamplerSettings.from_fields(sampling),
            max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            logprobs=logprobs,
            progress=progress,
            dropped_turns=dropped_turns,
        )
        return TokenStream(self.engine, self.tokenizer, request, self._turn, on_end)

    def _checked(self, ids: Sequence[int]) -> list[int]:
        size = self.engine.vocabulary_size
        taken = [int(i) for i in ids]
        wrong = [i for i in taken if not 0 <= i < size]
        if wrong:
            raise SettingError(f"prompt: saw token id {wrong[0]}, wanted 0 to {size - 1}")
        return taken

    def _encode_text(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text, bos=True)
        if not ids and self.tokenizer.bos_id is not None:
            return [self.tokenizer.bos_id]
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
        """A conversation; `settings` are defaults for all its answers."""
        engine = ChatEngine(
            encode=self._encode_chat,
            stream=self._stream_ids,
            context=self.context,
            used=lambda: len(self.engine.ids),
        )
        return Chat(engine, system, **settings)

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits (len(ids), vocabulary) float32 behind each token of `ids`, read from the beginning."""
        with self._turn:
            self.engine.rewind(0)
            return self.engine.append_all(self._checked(ids))

    def close(self) -> None:
        """Give back threads, memory and the file. May be called twice."""
        if not self._closed:
            self._closed = True
            self.engine.close()
            if self._on_close:
                self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
