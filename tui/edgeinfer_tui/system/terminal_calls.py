"""What differs between systems for a program in a terminal: pipes, signals, displays, Textual's driver."""

import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, TextIO

PEEK_SECONDS = 0.02
STD_OUTPUT_HANDLE, STD_ERROR_HANDLE = -11, -12
ENABLE_VIRTUAL_TERMINAL_PROCESSING = 4


def has_input_within(raw: BinaryIO, seconds: float) -> bool:
    """Whether data or the end of a piped input arrives within that time."""
    if sys.platform != "win32":
        return bool(select.select([raw], [], [], seconds)[0])
    end = time.monotonic() + seconds
    while not _windows_pipe_is_ready(raw):
        if time.monotonic() > end:
            return False
        time.sleep(PEEK_SECONDS)
    return True


def _windows_pipe_is_ready(raw: BinaryIO) -> bool:
    """Whether reading returns at once: data is there, the other end is closed, or it is no pipe."""
    if sys.platform != "win32":
        return True
    import ctypes
    import msvcrt

    kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
    handle, available = ctypes.c_void_p(msvcrt.get_osfhandle(raw.fileno())), ctypes.c_uint32()
    peeked = kernel32.PeekNamedPipe(handle, None, 0, None, ctypes.byref(available), None)
    return not peeked or available.value > 0


def has_display(environment: Mapping[str, str]) -> bool:
    """Whether windows can be shown: always on Windows and macOS, elsewhere if a display is named."""
    if sys.platform in ("win32", "darwin"):
        return True
    return bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))


def call_on_stop_signals(callback: Callable[[], Any]) -> None:
    """Call it in this event loop when a signal stops the program. Windows' loops can't; there, closing the
    window ends the program.
    """
    if sys.platform != "win32":
        import asyncio

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, callback)


def console_encoding(stream: TextIO, system: str = sys.platform) -> str | None:
    """UTF-8 for a pipe or file on Windows, whose default is a code page; None: the stream's encoding."""
    return "utf-8" if system == "win32" and not stream.isatty() else None


def allow_escape_sequences() -> None:
    """Let the console of Windows interpret escape sequences, as other terminals do."""
    if sys.platform != "win32":
        return
    import ctypes

    kernel32 = ctypes.WinDLL("kernel32")
    kernel32.GetStdHandle.restype = ctypes.c_void_p
    for number in (STD_OUTPUT_HANDLE, STD_ERROR_HANDLE):
        handle, mode = ctypes.c_void_p(kernel32.GetStdHandle(number)), ctypes.c_uint32()
        if kernel32.GetConsoleMode(handle, ctypes.byref(mode)):
            kernel32.SetConsoleMode(handle, mode.value | ENABLE_VIRTUAL_TERMINAL_PROCESSING)


END_OF_INPUT_KEY = "Ctrl-Z and Enter" if sys.platform == "win32" else "Ctrl-D"
"""What ends the input of a terminal."""


def is_posix_terminal() -> bool:
    """Whether terminals are those of POSIX, which may be lost while the program runs."""
    return sys.platform != "win32"
