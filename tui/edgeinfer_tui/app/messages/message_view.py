"""One message on the screen: speaker, folded reasoning, Markdown, tool calls, and its actions."""

from textwrap import indent
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from edgeinfer.chat_templates.reasoning import Reply, parted
from edgeinfer.history.tool_messages import results_of
from edgeinfer.history.tree import ChatMessage
from edgeinfer_tui.app.messages.markdown_text import MarkdownText
from edgeinfer_tui.app.messages.message_parts import MessageHead, ReasoningView, ToolCallsView, with_calls

MAX_LINES = 16
"""Lines of a message that are shown; an attached file may have thousands."""
CODE_INDENT = "    "
"""Before lines that Markdown shows as they are: results of tools."""
ENDINGS = {"coming": "cut off", "stopped": "stopped", "failed": "failed"}


class MessageView(Vertical, can_focus=True):
    """A message. Actions requested by a key or a click are posted as `ActionRequested`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "ask('back')", "another"),
        Binding("right", "ask('on')", "another"),
        Binding("up", "screen.go(-1)", "up"),
        Binding("down", "screen.go(1)", "down"),
        Binding("enter", "screen.write", "write"),
        Binding("e", "ask('edit')", "edit"),
        Binding("r", "ask('again')", "again"),
        Binding("c", "ask('copy')", "copy"),
        Binding("t", "reasoning", "reasoning"),
        *(Binding(str(number), f"code({number})", "copy code", show=False) for number in range(1, 10)),
    ]

    class Typed(Message):
        """A character that is not a key of the message: it is typed into the input."""

        def __init__(self, character: str) -> None:
            super().__init__()
            self.character = character

    class ActionRequested(Message):
        """An action on a message: back, on, edit, again, copy."""

        def __init__(self, view: "MessageView", what: str) -> None:
            super().__init__()
            self.view, self.what = view, what

    def __init__(
        self, message: ChatMessage, speaker: str, opens_reasoning: bool, number: int, count: int
    ) -> None:
        """`number`: number of this alternative among `count`, from 1."""
        super().__init__(classes=message.role)
        self.message, self._speaker, self._opens_reasoning = message, speaker, opens_reasoning
        self._number, self._count = number, count
        self._head = MessageHead(classes="head")
        self._reasoning = ReasoningView()
        self._text = MarkdownText()
        self._calls = ToolCallsView()
        self._more = Static(markup=False, classes="more")
        self._failure = Static(markup=False, classes="failure")
        self._unfolded = False

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._reasoning
        yield self._text
        yield self._more
        yield self._calls
        yield self._failure

    async def on_mount(self) -> None:
        self._failure.display = self._more.display = False
        await self.show(ended=True)

    async def show(self, ended: bool, failure: str | None = None) -> None:
        """Display the current text; `ended` False: more will follow."""
        self._show_head(ended)
        if self.message.role == "assistant":
            reply = self._reply(ended)
            self._reasoning.show(reply)
            parsed, is_coming = with_calls(reply.response, ended)
            self._calls.show(parsed.calls, is_coming)
            await self._text.show(parsed.content, ended)
        else:
            self._reasoning.display = False
            await self._show_message()
        if failure is not None:
            self._failure.update(Content(failure))
            self._failure.display = True

    def ask(self, what: str) -> None:
        self.post_message(self.ActionRequested(self, what))

    def action_ask(self, what: str) -> None:
        self.ask(what)

    async def action_reasoning(self) -> None:
        if self.message.role == "assistant":
            self._reasoning.toggle()
        else:
            self._unfolded = not self._unfolded
            await self._show_message()

    def action_code(self, number: int) -> None:
        codes = list(self._text.codes())
        if number <= len(codes):
            self.app.copy_to_clipboard(codes[number - 1])
            self.app.notify(f"copied block {number}", timeout=2)

    def response_text(self) -> str:
        """The text without the reasoning."""
        return self._reply(True).response if self.message.role == "assistant" else self._plain_text

    @property
    def _plain_text(self) -> str:
        """The text of a message that isn't a response."""
        if self.message.role != "tool":
            return self.message.text
        return "\n".join(f"{name}: {content}" for name, content in results_of(self.message.text))

    def on_click(self, event: events.Click) -> None:
        self.focus()

    def keys(self) -> dict[str, str]:
        """Key -> its action on this message in its current state."""
        keys = {"e": "edit", "r": "again", "c": "copy"} if self.message.role != "tool" else {"c": "copy"}
        if self._can_unfold():
            keys["t"] = "unfold"
        codes = list(self._text.codes())
        keys |= {str(number): "copy code" for number in range(1, min(len(codes), 9) + 1)}
        return keys

    def hints(self) -> list[str]:
        """Descriptions of `keys`, for the status line."""
        keys = self.keys()
        codes = [key for key in keys if key.isdigit()]
        shown = [f"{key} {what}" for key, what in keys.items() if not key.isdigit()]
        if codes:
            shown.append(f"{codes[0] if len(codes) == 1 else f'1-{codes[-1]}'} copy code")
        return [*shown, *(["←→ another"] if self._count > 1 else []), "Esc write"]

    def on_key(self, event: events.Key) -> None:
        """Pass a character without an action here on to the input."""
        if event.is_printable and event.character and event.character not in self.keys():
            event.stop()
            event.prevent_default()
            self.post_message(self.Typed(event.character))

    def _can_unfold(self) -> bool:
        if self.message.role == "assistant":
            return bool(self._reasoning.display)
        return len(self._plain_text.split("\n")) > MAX_LINES

    def _reply(self, ended: bool) -> Reply:
        return parted(self.message.text, self._opens_reasoning, ended)

    def _show_head(self, ended: bool) -> None:
        message = self.message
        speaker = {"user": "You", "tool": "Tools"}.get(message.role, self._speaker)
        parts = [Content.styled(speaker, "bold")]
        if self._count > 1:
            parts.append(
                Content.from_markup(
                    "[@click=ask('back')]<[/] $place/$count [@click=ask('on')]>[/]",
                    place=str(self._number),
                    count=str(self._count),
                )
            )
        if ended and message.role == "assistant" and message.state in ENDINGS:
            parts.append(Content.styled(ENDINGS[message.state], "italic"))
        if ended:
            doing = {"user": ("edit", "copy"), "tool": ("copy",)}.get(message.role, ("again", "copy"))
            parts += [Content.from_markup(f"[@click=ask('{what}')]\\[{what}][/]") for what in doing]
        self._head.update(Content("  ").join(parts))

    async def _show_message(self) -> None:
        text = self._plain_text
        if self.message.role == "tool":
            text = indent(text, CODE_INDENT, lambda line: True)
        lines = text.split("\n")
        more = 0 if self._unfolded else max(0, len(lines) - MAX_LINES)
        self._more.display = more > 0
        self._more.update(Content(f"... {more} more lines (t shows them)"))
        await self._text.show("\n".join(lines[: len(lines) - more]))
