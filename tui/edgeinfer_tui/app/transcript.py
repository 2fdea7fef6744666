"""The turns of a branch, one above the other, at the newest of which the screen stays."""

from collections.abc import Sequence

from textual.containers import VerticalScroll

from edgeinfer.history.tree import ChatTree, Turn
from edgeinfer_tui.app.turn_view import MessageView

NO_MODEL = "Model"
"""Who speaks while none is loaded."""
MAX_TURNS = 40
"""Turns that are shown at first; those before them come when the first one is asked for."""


class Transcript(VerticalScroll, can_focus=False):
    """`speaker`: what the model is called."""

    def __init__(self) -> None:
        super().__init__(id="transcript")
        self.speaker = NO_MODEL
        self.thinks_first = False
        self._earlier: Sequence[Turn] = ()
        self._tree = ChatTree()

    async def show(self, tree: ChatTree, line: Sequence[Turn]) -> None:
        """Show a branch from its end."""
        self._tree, self._earlier = tree, line[:-MAX_TURNS]
        await self.remove_children()
        await self.mount_all([self._view(turn) for turn in line[-MAX_TURNS:]])
        self.anchor()

    async def follow(self, tree: ChatTree, line: Sequence[Turn]) -> None:
        """Keep what is shown of a branch that another one shares, and show the rest of that one."""
        views = self.views()
        same = 0
        shown = line[len(self._earlier) :]
        while same < min(len(views), len(shown)) and views[same].turn is shown[same]:
            same += 1
        if not same or list(self._earlier) != list(line[: len(self._earlier)]):
            await self.show(tree, line)
            return
        self._tree = tree
        for view in views[same:]:
            await view.remove()
        await self.mount_all([self._view(turn) for turn in shown[same:]])
        self.anchor()

    async def show_earlier(self) -> bool:
        """Show some of the turns before the first; False: there are none."""
        if not self._earlier:
            return False
        coming, self._earlier = self._earlier[-MAX_TURNS:], self._earlier[:-MAX_TURNS]
        await self.mount_all([self._view(turn) for turn in coming], before=0)
        return True

    def views(self) -> list[MessageView]:
        """What is shown, from the top."""
        return list(self.query_children(MessageView))

    def view_of(self, turn: Turn) -> MessageView | None:
        """Where a turn is shown."""
        return next((view for view in self.views() if view.turn is turn), None)

    def _view(self, turn: Turn) -> MessageView:
        beside = self._tree.alternatives(turn)
        return MessageView(turn, self.speaker, self.thinks_first, list(beside).index(turn) + 1, len(beside))
