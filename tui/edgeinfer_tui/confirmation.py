"""Yes/no questions before a removal or a download; not shown when input is not a terminal."""

import sys
from typing import Annotated, Any

from typer import Option

Yes = Annotated[
    bool, Option("--yes", "-y", help="Don't ask before something is removed.", show_default=False)
]


def on_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal."""
    return stream is not None and not stream.closed and bool(stream.isatty())


def agreed(question: str, default: bool = False) -> bool:
    """Ask a yes/no question on stderr and return the reply. Ctrl-D means no.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    choices = "Y/n" if default else "y/N"
    while True:
        print(f"{question} [{choices}] ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            print(file=sys.stderr)
            return False
        reply = line.strip().casefold()
        if not reply:
            return default
        if reply in ("y", "yes", "n", "no"):
            return reply.startswith("y")


def confirm_removal(question: str, yes: bool) -> bool:
    """Whether to remove: on a terminal the user is prompted, unless `yes`."""
    return yes or not (on_terminal(sys.stdin) and on_terminal(sys.stderr)) or agreed(question)
