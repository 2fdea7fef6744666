"""The Textual application of the chat: themes, signal handling and shutdown."""

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from textual import events
from textual.app import App
from textual.driver import Driver
from textual.theme import Theme

from edgeinfer_tui.app.chat_controller import ChatController
from edgeinfer_tui.app.chat_screen import ChatScreen
from edgeinfer_tui.chat_session import SessionStore
from edgeinfer_tui.options.parsed_options import ParsedOptions
from edgeinfer_tui.system.terminal_calls import call_on_stop_signals, is_posix_terminal

LEAVE_SECONDS = 5.0
"""Time limit for the model to free its memory at exit, in seconds."""
THEMES = {True: ("ansi-dark", "ansi-light"), False: ("textual-dark", "edgeinfer-light")}
"""Whether the terminal has 16 colors only -> names of the dark and the light theme."""
LIGHT = Theme(
    "edgeinfer-light",
    primary="#004578",
    secondary="#005a9e",
    accent="#8f4700",
    warning="#7a4b00",
    error="#9c1c3c",
    success="#1c6334",
    foreground="#1a1a1a",
    surface="#f4f4f4",
    panel="#e6e6e6",
    background="#fafafa",
    dark=False,
    variables={
        "text-muted": "#4f4f4f",
        "text-disabled": "#5c5c5c",
        "block-cursor-background": "#003a66",
        "block-cursor-foreground": "#ffffff",
        "block-cursor-blurred-background": "#d5e1ea",
        "foreground-muted": "#4f4f4f",
        "foreground-disabled": "#5c5c5c",
    },
)
"""The light theme: each text has a contrast of 4.5 or more with its background (WCAG 2.2, level AA)."""
FEW_COLOURS = (None, "standard", "windows")


class ChatApp(App[None]):
    """The Textual application. `failure`: the error that ended it, or None."""

    CSS_PATH = Path(__file__).with_name("chat.tcss")
    TITLE = "edgeinfer"
    ENABLE_COMMAND_PALETTE = False

    def __init__(
        self,
        options: ParsedOptions,
        store: SessionStore | None = None,
        dark: bool = True,
        warnings: Sequence[str] = (),
    ) -> None:
        """`warnings`: warnings to show before the first message."""
        # Textual's constructor decides how colors are removed, so the theme is set after it.
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        few = self.no_color or self.console.color_system in FEW_COLOURS
        self.register_theme(LIGHT)
        self._themes = THEMES[few]
        self.theme = self._themes[0 if dark else 1]
        self.chat_screen = ChatScreen(options, store, self._fail, warnings)
        self.failure: Exception | None = None
        self._left: Future[None] | None = None

    @property
    def chat(self) -> ChatController:
        """The chat of the screen."""
        return self.chat_screen.chat

    def get_driver_class(self) -> type[Driver]:
        usual = super().get_driver_class()
        if not is_posix_terminal():
            return usual
        from textual.drivers.linux_driver import LinuxDriver

        from edgeinfer_tui.app.disconnect_safe_driver import DisconnectSafeDriver

        return DisconnectSafeDriver if usual is LinuxDriver else usual

    def get_default_screen(self) -> ChatScreen:
        return self.chat_screen

    def on_mount(self) -> None:
        if not self.is_headless:
            call_on_stop_signals(self.leave)

    def on_paste(self, event: events.Paste) -> None:
        """Send text that no other widget pasted to the message input, on any screen."""
        event.stop()
        self.chat_screen.input.paste(event.text)

    def switch_theme(self) -> None:
        """Switch between the dark and the light theme."""
        dark, light = self._themes
        self.theme = light if self.theme == dark else dark

    async def action_quit(self) -> None:
        """Quit; bound to Ctrl-Q on every screen."""
        self.leave()

    def leave(self) -> None:
        """Save the chat, free the model's memory, and exit."""
        if self._left is None:
            self._left = self.chat.leaving()
            self.run_worker(self._leave(self._left))

    async def _leave(self, left: "Future[None]") -> None:
        await asyncio.wait({asyncio.wrap_future(left)}, timeout=LEAVE_SECONDS)
        self.exit()

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self.leave()

    @property
    def at_rest(self) -> bool:
        """Whether the model thread is idle, so that the program can exit normally."""
        return self._left is not None and self._left.done()
