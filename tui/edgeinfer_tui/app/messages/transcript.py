"""The messages of a branch, one below the other; scrolls with the newest."""

from collections.abc import Sequence

from textual.containers import VerticalScroll
from textual.screen import Screen

from edgeinfer.history.tree import ChatMessage, ChatTree
from edgeinfer_tui.app.messages.message_view import MessageView

NO_MODEL = "Model"
"""Speaker's name while no model is loaded."""
MIN_HEIGHT = 3
"""Lines of messages that are shown however many notices there are."""
MAX_MESSAGES = 40
"""Messages shown initially; earlier ones are added on request."""


class Transcript(VerticalScroll, can_focus=False):
    """`speaker`: display name of the model."""

    def __init__(self) -> None:
        super().__init__(id="transcript")
        self.speaker = NO_MODEL
        self.opens_reasoning = False
        self._earlier: Sequence[ChatMessage] = ()
        self._tree = ChatTree()

    def on_mount(self) -> None:
        self.screen.screen_layout_refresh_signal.subscribe(self, self._keep_clear_of_notices)

    def _keep_clear_of_notices(self, screen: Screen[object]) -> None:
        """Begin below notices that would cover messages; the end of the last message stays in place."""
        toasts = [toast.region for toast in screen.query("Toast") if toast.region]
        right = max((view.region.right for view in self.views()), default=0)
        is_covered = any(toast.x < right for toast in toasts)
        lines = (
            max(toast.bottom for toast in toasts) - self.region.y + self.styles.margin.top
            if is_covered
            else 0
        )
        most = self.size.height + self.styles.margin.top - MIN_HEIGHT
        top = max(0, min(lines, most))
        if self.styles.margin.top != top:
            self.styles.margin = (top, 0, 0, 0)

    async def show(self, tree: ChatTree, line: Sequence[ChatMessage]) -> None:
        """Show the end of a branch."""
        self._tree, self._earlier = tree, line[:-MAX_MESSAGES]
        await self.remove_children()
        await self.mount_all([self._view(message) for message in line[-MAX_MESSAGES:]])
        self.anchor()

    async def follow(self, tree: ChatTree, line: Sequence[ChatMessage]) -> None:
        """Switch to another branch; messages shared with the one shown keep their widgets."""
        views = self.views()
        same = 0
        shown = line[len(self._earlier) :]
        while same < min(len(views), len(shown)) and views[same].message is shown[same]:
            same += 1
        if not same or list(self._earlier) != list(line[: len(self._earlier)]):
            await self.show(tree, line)
            return
        self._tree = tree
        for view in views[same:]:
            await view.remove()
        await self.mount_all([self._view(message) for message in shown[same:]])
        self.anchor()

    async def show_earlier(self) -> bool:
        """Show some earlier messages; False if there are none."""
        if not self._earlier:
            return False
        coming, self._earlier = self._earlier[-MAX_MESSAGES:], self._earlier[:-MAX_MESSAGES]
        await self.mount_all([self._view(message) for message in coming], before=0)
        return True

    def views(self) -> list[MessageView]:
        """The message widgets, from the top."""
        return list(self.query_children(MessageView))

    def view_of(self, message: ChatMessage) -> MessageView | None:
        """The widget of a message, or None."""
        return next((view for view in self.views() if view.message is message), None)

    def _view(self, message: ChatMessage) -> MessageView:
        siblings = self._tree.alternatives(message)
        return MessageView(
            message, self.speaker, self.opens_reasoning, list(siblings).index(message) + 1, len(siblings)
        )
