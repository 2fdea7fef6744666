"""One message on the screen: speaker, folded reasoning, Markdown with code blocks, and its actions."""

import json
import re
from collections.abc import Iterable
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Label, Markdown, Static
from textual.widgets.markdown import MarkdownBlock, MarkdownFence

from edgeinfer.chat_templates.reasoning import Reply, parted
from edgeinfer.history.tool_messages import results_of
from edgeinfer.history.tree import ChatMessage
from edgeinfer_tui.output.terminal_output import CONTROL_REPLACEMENTS

ONE_LINE_END = {**CONTROL_REPLACEMENTS, 0x2028: "\n", 0x2029: "\n"}
"""Maps all line separators to newline: Textual and the parser must agree on where a line ends."""

PARTIAL_MARK = re.compile(r"(?:(?<=\n)|\A)[ \t]*(?:\d{1,9}[.)]?|[-*+=#>`~|_ ]+)\Z")
"""Matches an incomplete last line that may become a list, a table, a code block, or plain text."""

BEGINS_AS_JSON = re.compile(r"\s*(?:\{\s*(?:[\"}]|\Z)|\[\s*[{\[\"])")


def _parser() -> MarkdownIt:
    """Markdown parser without HTML; a newline in the text is a line break."""
    parser = MarkdownIt("gfm-like", {"html": False})
    parser.core.ruler.push("line_ends", _keep_line_ends)
    return parser


def _keep_line_ends(state: StateCore) -> None:
    for token in state.tokens:
        for part in token.children or ():
            if part.type == "softbreak":
                part.type = "hardbreak"


def _with_json_as_code(text: str) -> str:
    """Wrap JSON at the start of a response in a code block; Markdown would drop its stars and line breaks."""
    if not BEGINS_AS_JSON.match(text):
        return text
    start = len(text) - len(text.lstrip())
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
    except ValueError:  # incomplete or truncated JSON
        return f"````json\n{text[start:]}"
    return f"````json\n{text[start:end]}\n````\n{text[end:]}"


class CopyLabel(Label):
    """The line above a code block; a click copies the block."""

    def on_click(self) -> None:
        block = self.parent
        assert isinstance(block, CodeBlock)
        self.app.copy_to_clipboard(block.code)
        self.app.notify("copied", timeout=2)


class CodeBlock(MarkdownFence):
    """A code block with a line above that names its language."""

    DEFAULT_CSS = """
    CodeBlock { margin: 0 0 1 0; }
    CodeBlock > Label { padding: 0 1; }
    CodeBlock > CopyLabel { width: 1fr; color: $text-muted; text-align: right; }
    CodeBlock > CopyLabel:hover { color: $text; text-style: underline; }
    """

    def compose(self) -> ComposeResult:
        yield CopyLabel(Content(f"{self.lexer or 'text'} [copy]"))
        yield from super().compose()


class ResponseText(Markdown):
    """Markdown that is streamed."""

    DEFAULT_CSS = """
    ResponseText { padding: 0; margin: 0; layout: vertical; height: auto; }
    ResponseText > MarkdownParagraph { margin: 0 0 1 0; }
    """

    def __init__(self) -> None:
        super().__init__(parser_factory=_parser, open_links=False)
        self._shown = ""

    def get_block_class(self, block_name: str) -> type[MarkdownBlock]:
        """The widget class of a block: ours for code, else Textual's."""
        own = super().get_block_class(block_name)
        return CodeBlock if own is MarkdownFence else own

    async def show(self, text: str, ended: bool = True) -> None:
        """Display `text`; if it extends the text shown, only the rest is appended. `ended` False: more will
        follow."""
        text = _with_json_as_code(text.translate(ONE_LINE_END))
        if not ended and (partial := PARTIAL_MARK.search(text)) and partial.start() >= len(self._shown):
            text = text[: partial.start()]
        if not text.startswith(self._shown):
            await self.update("")
            self._shown = ""
        # `append` after an `update` with a text would drop the last block of that text.
        if text != self._shown:
            await self.append(text[len(self._shown) :])
            self._shown = text

    def codes(self) -> Iterable[str]:
        """Contents of its code blocks, in order."""
        return [block.code for block in self.query(CodeBlock)]


MAX_LINES = 16
"""Lines of a message that are shown; an attached file may have thousands."""
ENDINGS = {"coming": "cut off", "stopped": "stopped", "failed": "failed"}


class MessageHead(Static):
    """The line above a message; words in brackets can be clicked."""

    def action_ask(self, what: str) -> None:
        view = self.parent
        assert isinstance(view, MessageView)
        view.ask(what)


class ReasoningView(Static):
    """The reasoning of a response, folded to one line; a click unfolds it."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self.unfolded = False
        self._reply = Reply("", "")

    def show(self, reply: Reply) -> None:
        self._reply = reply
        self.display = bool(reply.reasoning)
        if self.display:
            words = len(reply.reasoning.split())
            doing = "thinking ..." if reply.thinking else "reasoning"
            head = f"{'v' if self.unfolded else '>'} {doing} ({words} words)"
            body = f"\n{reply.reasoning.strip().translate(CONTROL_REPLACEMENTS)}" if self.unfolded else ""
            self.update(Content(head + body))

    def toggle(self) -> None:
        self.unfolded = not self.unfolded
        self.show(self._reply)

    def on_click(self) -> None:
        self.toggle()


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
        self._text = (
            ResponseText() if message.role == "assistant" else Static(markup=False, classes="message")
        )
        self._failure = Static(markup=False, classes="failure")
        self._unfolded = False

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._reasoning
        yield self._text
        yield self._failure

    async def on_mount(self) -> None:
        self._failure.display = False
        await self.show(ended=True)

    async def show(self, ended: bool, failure: str | None = None) -> None:
        """Display the current text; `ended` False: more will follow."""
        self._show_head(ended)
        if isinstance(self._text, ResponseText):
            reply = self._reply(ended)
            self._reasoning.show(reply)
            await self._text.show(reply.response, ended)
        else:
            self._reasoning.display = False
            self._show_message(self._text)
        if failure is not None:
            self._failure.update(Content(failure))
            self._failure.display = True

    def ask(self, what: str) -> None:
        self.post_message(self.ActionRequested(self, what))

    def action_ask(self, what: str) -> None:
        self.ask(what)

    def action_reasoning(self) -> None:
        if self.message.role == "assistant":
            self._reasoning.toggle()
        elif isinstance(self._text, Static):
            self._unfolded = not self._unfolded
            self._show_message(self._text)

    def action_code(self, number: int) -> None:
        codes = list(self._text.codes()) if isinstance(self._text, ResponseText) else []
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
        codes = list(self._text.codes()) if isinstance(self._text, ResponseText) else []
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

    def _show_message(self, static: Static) -> None:
        lines = self._plain_text.translate(CONTROL_REPLACEMENTS).split("\n")
        more = len(lines) - MAX_LINES
        if more > 0 and not self._unfolded:
            lines = [*lines[:MAX_LINES], f"... {more} more lines (t shows them)"]
        static.update(Content("\n".join(lines)))
