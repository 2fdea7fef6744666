"""One chat as the screen has it: its tree, where it stands, and who writes it down."""

from typing import Any

from edgeinfer.history.recorder import Recorder
from edgeinfer.history.titles import title_of
from edgeinfer.history.tree import ChatTree, Turn, line_to, read_by_the_model
from edgeinfer_tui.app.running_answer import RunningAnswer
from edgeinfer_tui.options.run_options import settings_again


class Dialogue:
    """A chat that goes on. `recorder` None: nothing is kept."""

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
        """The turns of the branch on which it stands."""
        return line_to(self.tip)

    @property
    def title(self) -> str:
        """Its name, or the beginning of what was said first; "" before that."""
        stored = None if self.recorder is None else self.recorder.stored
        if stored is not None and stored.name:
            return stored.name
        first = self.line[:1]
        return title_of(first[0].text) if first else ""

    def say(self, text: str, settings: dict[str, Any], instead_of: Turn | None = None) -> RunningAnswer:
        """A message behind the tip, or beside another one; the answer that is to come."""
        before = self.tip if instead_of is None else instead_of.parent
        return self.answer(self.tree.add(before, "user", text), settings)

    def answer(self, asked: Turn, settings: dict[str, Any]) -> RunningAnswer:
        """One more answer to a message."""
        before = read_by_the_model(line_to(asked.parent))
        settings = settings_again(settings, len(asked.children))
        self.tip = self.tree.add(asked, "assistant", "", "coming")
        return RunningAnswer(self.tip, before, asked.text, settings)
