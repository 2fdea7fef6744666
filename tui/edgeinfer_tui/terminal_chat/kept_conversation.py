"""A conversation that is recorded in the chat store as it proceeds."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from edgeinfer_tui.library import Conversation, Stream

if TYPE_CHECKING:
    from edgeinfer.history.recorder import Recorder
    from edgeinfer.history.records import State
    from edgeinfer.history.tree import ChatTree, Turn
    from edgeinfer.results import Generation, Token

Tell = Callable[[str], None]


class KeptConversation:
    """Wraps a conversation; every message is also written to the store.

    If the store can't be written, this is reported once through `tell` and the conversation goes on. Missing
    messages are written as soon as the store is writable again.
    """

    def __init__(
        self, inner: Conversation, recorder: "Recorder", tree: "ChatTree", tip: "Turn | None", tell: Tell
    ) -> None:
        """Continues after `tip` of the recorded chat (None: starts it); messages without a response are not
        passed to the model.
        """
        from edgeinfer.history.tree import answered, line_to, read_by_the_model

        self._inner, self._recorder, self._tree, self._tell = inner, recorder, tree, tell
        self._line: list[Turn] = answered(line_to(tip))
        """The stored message for each message of the conversation."""
        self._inner.messages += read_by_the_model(self._line)
        self._told: str | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self._inner.messages

    @messages.setter
    def messages(self, messages: list[dict[str, Any]]) -> None:
        self._inner.messages = messages

    @property
    def system(self) -> str | None:
        return self._inner.system

    @system.setter
    def system(self, text: str | None) -> None:
        self._inner.system = text
        self._recorder.set_system(text)
        self._tell_trouble()

    @property
    def context_used(self) -> int:
        return self._inner.context_used

    def stream(self, text: str, **settings: Any) -> Stream:
        return self._recorded(self._inner.stream(text, **settings), len(self._line), text)

    def regenerate(self, **settings: Any) -> Stream:
        return self._recorded(self._inner.regenerate(**settings), len(self._line) - 2, None)

    def edit(self, index: int, text: str, **settings: Any) -> Stream:
        return self._recorded(self._inner.edit(index, text, **settings), 2 * index, text)

    def clear(self) -> None:
        self._inner.clear()
        self._line.clear()

    def _recorded(self, stream: Stream, place: int, text: str | None) -> Stream:
        """Record a response after the first `place` messages and `text`; None: to the existing message."""
        before = self._line[:place]
        if text is None:
            asked = self._line[place]
        else:
            asked = self._tree.add(before[-1] if before else None, "user", text)
        answer = self._tree.add(asked, "assistant", "", "coming")
        self._recorder.begin(answer)

        def ended(kept: bool) -> None:
            self._tell_trouble()
            if kept:
                self._line[:] = [*before, asked, answer]

        return _RecordedStream(stream, self._recorder, answer, ended)

    def _tell_trouble(self) -> None:
        trouble = self._recorder.trouble
        if trouble is not None and trouble != self._told:
            self._tell(f"this part of the chat isn't on the disk: {trouble}")
        self._told = trouble


class _RecordedStream:
    """The stream of a response; its tokens are written before they are shown."""

    def __init__(
        self, inner: Stream, recorder: "Recorder", answer: "Turn", ended: Callable[[bool], None]
    ) -> None:
        """`ended` is called with whether the conversation keeps the response."""
        self._inner, self._recorder, self._answer, self._ended = inner, recorder, answer, ended

    def __iter__(self) -> "Iterator[Token]":
        try:
            for token in self._inner:
                self._recorder.add(token.text)
                self._answer.text += token.text
                yield token
        except Exception:
            self._finish("failed")
            raise
        self._finish("stopped" if self.result.finish_reason == "cancelled" else "whole")

    def cancel(self) -> None:
        self._inner.cancel()
        self._finish("stopped")

    @property
    def result(self) -> "Generation":
        return self._inner.result

    def _finish(self, state: "State") -> None:
        if self._answer.state != "coming":
            return
        self._answer.state = state
        self._recorder.finish(self._answer, state)
        self._ended(bool(self._answer.text) or state == "whole")
