"""Entry point of the program: arguments to exit code.

Slow modules are imported inside functions, after the Ctrl-C handler is installed.
"""

import gc
import sys
from typing import NoReturn

from edgeinfer_tui import interrupts
from edgeinfer_tui.interrupts import INTERRUPTED
from edgeinfer_tui.output.terminal_output import discard, guarded_output, reserve_standard_descriptors
from edgeinfer_tui.system.terminal_calls import allow_escape_sequences

OBJECTS_PER_COLLECTION = 50_000
"""With Python's default of 700, the collector would scan the objects of all imported modules repeatedly."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit the process with its exit code."""
    interrupts.end_program()
    reserve_standard_descriptors()
    allow_escape_sequences()
    gc.set_threshold(OBJECTS_PER_COLLECTION)
    try:
        code = exit_code(arguments)
    except KeyboardInterrupt:
        code = INTERRUPTED
    gc.freeze()  # the process is exiting: skip the search for reference cycles
    sys.exit(code)


def exit_code(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code; every failure prints one line to stderr."""
    from edgeinfer_tui.failures import report

    with guarded_output():
        code = _dispatch(arguments)
        try:
            sys.stdout.flush()
        except (OSError, ValueError) as error:  # full disk or closed pipe
            discard(sys.stdout)
            return code or report(error)
        return code


def _dispatch(arguments: list[str] | None) -> int:
    import typer

    from edgeinfer_tui.command_list import command_line
    from edgeinfer_tui.failures import WRONG_USAGE, is_usage_error, report, say

    try:
        code = command_line()(args=arguments, prog_name="edgeinfer", standalone_mode=False)
    except typer.Abort:
        return INTERRUPTED
    except Exception as error:
        if not is_usage_error(error):
            return report(error)
        text = _usage_text(error)
        say(f"{text} (see {_help_of(error, names_option=' -' in f' {text}')})")
        return WRONG_USAGE
    return code if isinstance(code, int) else 0


def _usage_text(error: Exception) -> str:
    """The usage error, on one line."""
    message: str = error.format_message()  # type: ignore[attr-defined]
    return " ".join(message.split()).removeprefix("Invalid value: ").removesuffix(".")


def _help_of(error: Exception, names_option: bool) -> str:
    """The command line that prints the help of the command with the usage error; with all options if the
    error names one.
    """
    from edgeinfer_tui.options.command_options import HELP_ALL

    context = getattr(error, "ctx", None)
    if context is None:
        return "edgeinfer --help"
    has_more = names_option and any(param.name == HELP_ALL for param in context.command.params)
    return f"{context.command_path} {'--help-all' if has_more else '--help'}"
