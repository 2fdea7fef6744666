"""State of one chat on the screen: message tree, current branch, recorder."""

from typing import Any

from edgeinfer.history.recorder import Recorder
from edgeinfer.history.titles import title_of
from edgeinfer.history.tree import ChatTree, Turn, line_to, read_by_the_model
from edgeinfer_tui.app.running_answer import RunningAnswer
from edgeinfer_tui.options.run_options import settings_again


class Dialogue:
    """A chat in progress. `recorder` None: it is not saved."""

    def __init__(
        self,
        tree: ChatTree,
        tip: Turn | None = None,
        recorder: Recorder | None = None,
        system: str | None = None,
    ) -> None:
        self.tree, self.tip, self.recorder, self.system = tree, tip, recorder, system

    @property
    def line(self) -> list[Turn]:
        """Messages of the current branch."""
        return line_to(self.tip)

    @property
    def title(self) -> str:
        """Name of the chat, or the beginning of its first message; "" if it is empty."""
        stored = None if self.recorder is None else self.recorder.stored
        if stored is not None and stored.name:
            return stored.name
        first = self.line[:1]
        return title_of(first[0].text) if first else ""

    def say(self, text: str, settings: dict[str, Any], instead_of: Turn | None = None) -> RunningAnswer:
        """Append a message, or add it as an alternative of `instead_of`; returns the pending response."""
        before = self.tip if instead_of is None else instead_of.parent
        return self.answer(self.tree.add(before, "user", text), settings)

    def answer(self, asked: Turn, settings: dict[str, Any]) -> RunningAnswer:
        """Start another response to a message."""
        before = read_by_the_model(line_to(asked.parent))
        settings = settings_again(settings, len(asked.children))
        self.tip = self.tree.add(asked, "assistant", "", "coming")
        return RunningAnswer(self.tip, before, asked.text, settings)
