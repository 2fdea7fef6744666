"""The message input."""

from collections.abc import Awaitable, Callable

from textual import events
from textual.message import Message
from textual.widgets import TextArea

from edgeinfer_tui.app.attachments import mention_of

NEW_LINE = ("ctrl+j", "shift+enter", "alt+enter")


class MessageInput(TextArea):
    """Enter sends; a pasted file path becomes a mention. All other keys are handled by TextArea."""

    class Submitted(Message):
        """A message or a command was entered."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Left(Message):
        """Ctrl-D or Up in an empty input: focus moves out of the input."""

        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    def __init__(self, complete: Callable[[str], Awaitable[str]]) -> None:
        """`complete` returns the text that Tab completes the input to."""
        super().__init__(id="input", compact=True, soft_wrap=True, highlight_cursor_line=False)
        self._complete = complete
        self.placeholder = "Say something; F1 helps"

    def send(self) -> None:
        """Send the text, as Enter does."""
        if self.text.strip():
            self.post_message(self.Submitted(self.text))

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.stop()
            event.prevent_default()
            self.send()
        elif event.key in NEW_LINE:
            event.stop()
            event.prevent_default()
            self.insert("\n")
        elif event.key == "tab" and self.text:
            event.stop()
            event.prevent_default()
            # Keys typed during completion are queued until it is done.
            completed = await self._complete(self.text)
            if completed != self.text:
                self.text = completed
                self.move_cursor(self.document.end)
        elif event.key == "ctrl+u":
            event.stop()
            event.prevent_default()
            self.clear()
        elif event.key in ("ctrl+d", "up") and not self.text:
            event.stop()
            event.prevent_default()
            self.post_message(self.Left(event.key))

    async def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        self.paste(event.text)

    def paste(self, text: str) -> None:
        """Replace the selection by the pasted text; a file path becomes a mention."""
        mention = mention_of(text)
        self.replace(text if mention is None else f"{mention} ", *self.selection)
        self.focus()
