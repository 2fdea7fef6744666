"""A fake model with the library's interface and a scripted response."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np

from edgeinfer.chat_templates.tool_calls import ToolCall
from edgeinfer.embedding import TextVectors
from edgeinfer.errors import ContextOverflowError
from edgeinfer.ranking import Ranking, ranked
from edgeinfer.results import FinishReason, Generation, Speed, Token
from edgeinfer_tui.library import Progress

ANSWER = "There was a fox."


class FakeTokenizer:
    """One token per character."""

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return "".join(map(chr, ids))


@dataclass(frozen=True)
class FakeItem:
    item: str
    device: str
    bytes: int


@dataclass(frozen=True)
class FakePrediction:
    decode_tokens_per_second: float = 54.0


class FakePlan:
    items: tuple[FakeItem, ...] = (
        FakeItem("layer 0 attention", "gpu", 3 << 20),
        FakeItem("layer 0 keys and values", "gpu", 1 << 20),
        FakeItem("layer 0 feed-forward", "cpu", 6 << 20),
        FakeItem("draft model", "cpu", 2 << 20),
    )
    budgets: Mapping[str, int] = MappingProxyType({"gpu": 8 << 20, "cpu": 16 << 20})
    prediction = FakePrediction()
    relaxations: tuple[str, ...] = ()

    def explain(self) -> str:
        return "everything lies in RAM"


class FakeStream:
    """Yields one word per token. KeyboardInterrupt is raised after `interrupt_after` tokens, and the context
    shifts after `shift_after`.
    """

    def __init__(
        self,
        words: list[str],
        *,
        prompt_tokens: int,
        end: FinishReason = "stop",
        dropped_messages: int = 0,
        shift_after: int | None = None,
        interrupt_after: int | None = None,
        pause: float = 0.0,
        before_word: Callable[[], object] = lambda: None,
        on_end: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._words = words
        self._prompt_tokens = prompt_tokens
        self._end: FinishReason = end
        self._dropped_messages = dropped_messages
        self._shift_after = shift_after
        self._interrupt_after = interrupt_after
        self._pause = pause
        self._before_word = before_word
        self._on_end = on_end
        self._tokens: list[Token] = []
        self._reason: FinishReason = "cancelled"

    def __iter__(self) -> Iterator[Token]:
        for index, word in enumerate(self._words):
            if index == self._interrupt_after:
                raise KeyboardInterrupt
            self._before_word()
            time.sleep(self._pause)
            self._tokens.append(
                Token(index, word, logprob=-0.5, top_logprobs=((ord("a"), -0.5), (ord("b"), -1.5)))
            )
            yield self._tokens[-1]
        self._finish(self._end)

    def cancel(self) -> None:
        self._finish("cancelled")

    @property
    def result(self) -> Generation:
        text = "".join(token.text for token in self._tokens)
        speed = Speed(
            prompt_tokens=self._prompt_tokens,
            generated_tokens=len(self._tokens),
            seconds_to_first_token=0.21,
            prompt_tokens_per_second=312.0,
            decode_tokens_per_second=54.0,
        )
        ids = [token.id for token in self._tokens]
        shifts = int(self._shift_after is not None and len(ids) > self._shift_after)
        return Generation(
            text,
            ids,
            self._reason,
            speed,
            prompt_ids=list(range(900)),
            tokens=self._tokens,
            dropped_messages=self._dropped_messages,
            context_shifts=shifts,
            evicted_tokens=256 * shifts,
        )

    def _finish(self, reason: FinishReason) -> None:
        self._reason = reason
        self._on_end("".join(token.text for token in self._tokens))


class FakeChat:
    def __init__(self, model: "FakeModel", system: str | None) -> None:
        self.model = model
        self.system = system
        self.messages: list[dict[str, Any]] = []
        self.tool_calls: tuple[ToolCall, ...] = ()

    @property
    def context_used(self) -> int:
        return sum(len(message["content"].split()) for message in self.messages)

    def stream(self, text: str, **settings: Any) -> FakeStream:
        self.messages.append({"role": "user", "content": text})
        return self._answer(settings)

    def stream_results(self, results: Sequence[Any], **settings: Any) -> FakeStream:
        return self._answer(settings)

    def edit(self, index: int, text: str, **settings: Any) -> FakeStream:
        indices = [position for position, message in enumerate(self.messages) if message["role"] == "user"]
        del self.messages[indices[index] :]
        return self.stream(text, **settings)

    def clear(self) -> None:
        self.messages.clear()

    def _answer(self, settings: dict[str, Any]) -> FakeStream:
        user_message = self.messages[-1]["content"]

        def keep(text: str) -> None:
            self.messages.append({"role": "assistant", "content": text})

        return self.model.begin(f"chat[{self.system}] {user_message}", settings, on_end=keep)


class FakeModel:
    """Responds to every prompt with `response`; records the prompts."""

    def __init__(self, response: str = ANSWER, **options: Any) -> None:
        self.name = "fake"
        self.warnings: tuple[str, ...] = ("a warning of loading",)
        self.details: tuple[str, ...] = ("drafting with a small model",)
        self.context = 1024
        self.tokenizer = FakeTokenizer()
        self.plan = FakePlan()
        self.chat_format: object | None = object()
        self.prompt_style: str | None = "raw"
        self.sampling: dict[str, Any] = {}
        self.gpu: int | None = None
        self.response = response
        self.options = options
        self.prompts: list[str] = []
        self.settings: list[dict[str, Any]] = []
        self.chats: list[FakeChat] = []
        self.loaded_with: dict[str, Any] = {}
        self.closed = False
        self.snapshots = 0
        self.snapshot_owners: list[str | None] = []
        """How often a snapshot was saved."""

    def begin(self, prompt: str, settings: dict[str, Any], **more: Any) -> FakeStream:
        if "overflow" in prompt:
            raise ContextOverflowError("prompt: 2000 tokens, wanted at most 1024")
        if "explode" in prompt:
            raise ZeroDivisionError("float division\nby zero")
        self.prompts.append(prompt)
        settings = dict(settings)
        if "progress" in settings:
            settings.pop("progress")(1, 2)
        self.settings.append(settings)
        words = [word + " " for word in self.response.split(" ")]
        words[-1] = words[-1].removesuffix(" ")
        return FakeStream(words, prompt_tokens=9, **self.options, **more)

    def stream(self, prompt: str | Sequence[int], *, raw: bool = True, **settings: Any) -> FakeStream:
        return self.begin(f"raw {prompt}", settings)

    def generate(self, prompt: str | list[dict[str, Any]], *, n: int, **settings: Any) -> list[Generation]:
        self.counts = {name: settings.pop(name) for name in ("best_of", "beams") if name in settings}
        stream = self.begin(str(prompt), settings)
        list(stream)
        return [stream.result] * n

    def generate_each(
        self, prompts: Sequence[str] | Sequence[list[dict[str, Any]]], *, raw: bool = False, **settings: Any
    ) -> Iterator[Generation | Exception]:
        for prompt in prompts:
            try:
                stream = self.begin(f"raw {prompt}" if raw else str(prompt), settings)
            except ContextOverflowError as error:
                yield error
                continue
            list(stream)
            yield stream.result

    def chat(self, system: str | None = None, **settings: Any) -> FakeChat:
        self.chats.append(FakeChat(self, system))
        return self.chats[-1]

    def text_vectors(
        self, texts: Sequence[str], pooling: str | None = None, normalize: bool = True
    ) -> TextVectors:
        self.prompts += texts
        return TextVectors(np.ones((len(texts), 4), np.float32), len(texts))

    def ranking(self, query: str, texts: Sequence[str]) -> Ranking:
        self.prompts += [query, *texts]
        return Ranking(ranked(texts, range(len(texts))), len(texts))

    def keep_snapshot(self, owner: str | None = None) -> bool:
        self.snapshots += 1
        self.snapshot_owners.append(owner)
        return True

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def main() -> None:
    """The command line over a slow fake model, for tests that need a separate process."""
    from edgeinfer_tui import command_line, library

    def load(
        name: str | None, settings: dict[str, Any], progress: Progress, build_progress: Progress
    ) -> FakeModel:
        if settings.get("threads") == 99:
            print("loading", file=sys.stderr, flush=True)
            time.sleep(30)
        return FakeModel("word " * 2000 + "end", pause=0.01)

    library.load_model = load
    command_line.main()


if __name__ == "__main__":
    main()
