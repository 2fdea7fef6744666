"""One message on the screen: speaker, folded reasoning, text, and its actions."""

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from edgeinfer.chat_templates.reasoning import Reply, parted
from edgeinfer.history.tree import Turn
from edgeinfer_tui.app.code_block import AnswerText
from edgeinfer_tui.output.terminal_output import HARMLESS

MAX_LINES = 16
"""Lines of a message that are shown; an attached file may have thousands."""
ENDINGS = {"coming": "cut off", "stopped": "stopped", "failed": "failed"}


class TurnHead(Static):
    """The line above a message; words in brackets can be clicked."""

    def action_ask(self, what: str) -> None:
        view = self.parent
        assert isinstance(view, MessageView)
        view.ask(what)


class Thought(Static):
    """The reasoning of a response, folded to one line; a click unfolds it."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self.unfolded = False
        self._reply = Reply("", "")

    def show(self, reply: Reply) -> None:
        self._reply = reply
        self.display = bool(reply.thought)
        if self.display:
            words = len(reply.thought.split())
            doing = "thinking ..." if reply.thinking else "thought"
            head = f"{'v' if self.unfolded else '>'} {doing} ({words} words)"
            body = f"\n{reply.thought.strip().translate(HARMLESS)}" if self.unfolded else ""
            self.update(Content(head + body))

    def toggle(self) -> None:
        self.unfolded = not self.unfolded
        self.show(self._reply)

    def on_click(self) -> None:
        self.toggle()


class MessageView(Vertical, can_focus=True):
    """A message. Actions requested by a key or a click are posted as `Asked`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "ask('back')", "another"),
        Binding("right", "ask('on')", "another"),
        Binding("up", "screen.go(-1)", "up"),
        Binding("down", "screen.go(1)", "down"),
        Binding("enter", "screen.write", "write"),
        Binding("e", "ask('edit')", "edit"),
        Binding("r", "ask('again')", "again"),
        Binding("c", "ask('copy')", "copy"),
        Binding("t", "thought", "thought"),
        *(Binding(str(number), f"code({number})", "copy code", show=False) for number in range(1, 10)),
    ]

    class Typed(Message):
        """A character that is not a key of the message: it is typed into the input."""

        def __init__(self, character: str) -> None:
            super().__init__()
            self.character = character

    class Asked(Message):
        """An action on a message: back, on, edit, again, copy."""

        def __init__(self, view: "MessageView", what: str) -> None:
            super().__init__()
            self.view, self.what = view, what

    def __init__(self, turn: Turn, speaker: str, thinks_first: bool, place: int, count: int) -> None:
        """`place`: number of this alternative among `count`, from 1."""
        super().__init__(classes=turn.role)
        self.turn, self._speaker, self._thinks_first = turn, speaker, thinks_first
        self._place, self._count = place, count
        self._head = TurnHead(classes="head")
        self._thought = Thought()
        self._text = AnswerText() if turn.role == "assistant" else Static(markup=False, classes="message")
        self._failure = Static(markup=False, classes="failure")
        self._unfolded = False

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._thought
        yield self._text
        yield self._failure

    async def on_mount(self) -> None:
        self._failure.display = False
        await self.show(ended=True)

    async def show(self, ended: bool, failure: str | None = None) -> None:
        """Display the current text; `ended` False: more will follow."""
        self._show_head(ended)
        if isinstance(self._text, AnswerText):
            reply = self._reply(ended)
            self._thought.show(reply)
            await self._text.show(reply.said, ended)
        else:
            self._thought.display = False
            self._show_message(self._text)
        if failure is not None:
            self._failure.update(Content(failure))
            self._failure.display = True

    def ask(self, what: str) -> None:
        self.post_message(self.Asked(self, what))

    def action_ask(self, what: str) -> None:
        self.ask(what)

    def action_thought(self) -> None:
        if self.turn.role == "assistant":
            self._thought.toggle()
        elif isinstance(self._text, Static):
            self._unfolded = not self._unfolded
            self._show_message(self._text)

    def action_code(self, number: int) -> None:
        codes = list(self._text.codes()) if isinstance(self._text, AnswerText) else []
        if number <= len(codes):
            self.app.copy_to_clipboard(codes[number - 1])
            self.app.notify(f"copied block {number}", timeout=2)

    def said(self) -> str:
        """The text without the reasoning."""
        return self._reply(True).said if self.turn.role == "assistant" else self.turn.text

    def on_click(self, event: events.Click) -> None:
        self.focus()

    def keys(self) -> dict[str, str]:
        """Key -> its action on this message in its current state."""
        found = {"e": "edit", "r": "again", "c": "copy"}
        if self._can_unfold():
            found["t"] = "unfold"
        codes = list(self._text.codes()) if isinstance(self._text, AnswerText) else []
        found |= {str(number): "copy code" for number in range(1, min(len(codes), 9) + 1)}
        return found

    def hints(self) -> list[str]:
        """Descriptions of `keys`, for the status line."""
        found = self.keys()
        codes = [key for key in found if key.isdigit()]
        shown = [f"{key} {what}" for key, what in found.items() if not key.isdigit()]
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
        if self.turn.role == "assistant":
            return bool(self._thought.display)
        return len(self.turn.text.split("\n")) > MAX_LINES

    def _reply(self, ended: bool) -> Reply:
        return parted(self.turn.text, self._thinks_first, ended)

    def _show_head(self, ended: bool) -> None:
        turn = self.turn
        parts = [Content.styled("You" if turn.role == "user" else self._speaker, "bold")]
        if self._count > 1:
            parts.append(
                Content.from_markup(
                    "[@click=ask('back')]<[/] $place/$count [@click=ask('on')]>[/]",
                    place=str(self._place),
                    count=str(self._count),
                )
            )
        if ended and turn.role == "assistant" and turn.state in ENDINGS:
            parts.append(Content.styled(ENDINGS[turn.state], "italic"))
        if ended:
            doing = ("edit", "copy") if turn.role == "user" else ("again", "copy")
            parts += [Content.from_markup(f"[@click=ask('{what}')]\\[{what}][/]") for what in doing]
        self._head.update(Content("  ").join(parts))

    def _show_message(self, static: Static) -> None:
        lines = self.turn.text.translate(HARMLESS).split("\n")
        more = len(lines) - MAX_LINES
        if more > 0 and not self._unfolded:
            lines = [*lines[:MAX_LINES], f"... {more} more lines (t shows them)"]
        static.update(Content("\n".join(lines)))
