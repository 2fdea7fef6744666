"""Failures, each reported as one line on stderr and an exit code."""

import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

import typer

from edgeinfer_tui.interrupts import INTERRUPTED
from edgeinfer_tui.output.terminal_output import discard

FAILED = 1
WRONG_USAGE = 2
MAX_LINE = 2000
"""Maximum characters of an error line, since it may quote a file or a server's reply."""
PIPE_CLOSED = 128 + 13
"""The exit code that a shell reports for a program ended by SIGPIPE."""

Parameters = ParamSpec("Parameters")


def reporting(body: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Wrap a command so that every exception becomes one line and an exit code."""

    @functools.wraps(body)
    def wrapped(*positional: Parameters.args, **named: Parameters.kwargs) -> None:
        try:
            body(*positional, **named)
        except Exception as error:
            if is_usage_error(error) or isinstance(error, (typer.Exit, typer.Abort)):
                raise
            raise typer.Exit(report(error)) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(report(error)) from error

    return wrapped


def report(error: BaseException) -> int:
    """Print an error on stderr and return the exit code. A closed pipe is not an error: nothing is
    printed.
    """
    if isinstance(error, BrokenPipeError):
        discard(sys.stdout)
        return PIPE_CLOSED
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if os.environ.get("EDGEINFER_DEBUG", "") not in ("", "0"):
        traceback.print_exception(error)
    say(one_line(error))
    return FAILED


def say(line: str) -> None:
    """Print one line on stderr, prefixed with the program's name; options have the names of their flags."""
    from edgeinfer.options.option_names import with_flags

    print(f"edgeinfer: {with_flags(line)}", file=sys.stderr)


@contextmanager
def resumable(command: str) -> Iterator[None]:
    """Ctrl-C in the body ends the program with a line that says that the `command` resumes.

    Raises:
        typer.Exit: after Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        say(f"stopped; what is done is kept, the same {command} resumes with it")
        raise typer.Exit(INTERRUPTED) from None


def one_line(error: BaseException) -> str:
    """The text of an exception, on one line of at most `MAX_LINE` characters."""
    if isinstance(error, OSError) and error.strerror:
        prefix = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        text = f"{prefix}{error.strerror}"
    else:
        text = _text_of(error)
    text = " ".join(text.split())
    if len(text) > MAX_LINE:
        text = f"{text[: MAX_LINE - 3]}..."
    if _is_own_error(error):
        return text
    hint = "set EDGEINFER_DEBUG=1 to see where" if "EDGEINFER_DEBUG" not in os.environ else "see above"
    return f"unexpected {type(error).__name__}: {text or 'no message'} (a bug in edgeinfer; {hint})"


def _text_of(error: BaseException) -> str:
    """The text of an exception; options have the names of their flags."""
    from edgeinfer.errors import EdgeInferError
    from edgeinfer.options.option_names import error_with_flags

    return error_with_flags(error) if isinstance(error, EdgeInferError) else str(error)


def is_usage_error(error: BaseException) -> bool:
    """Whether the error is in the command line itself.

    Checked by attributes, because typer's releases import these classes from different modules.
    """
    return hasattr(error, "format_message") and getattr(error, "exit_code", None) == WRONG_USAGE


def _is_own_error(error: BaseException) -> bool:
    """Whether the error was raised by this project, with a text meant for users."""
    # Imported only after a failure, so that `--help` stays fast.
    from edgeinfer.errors import EdgeInferError
    from edgeinfer_quant_formats.errors import FormatError

    return isinstance(error, (EdgeInferError, FormatError, OSError))
