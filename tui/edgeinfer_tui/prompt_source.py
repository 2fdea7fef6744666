"""Builds the prompt from the command line, piped input, or both."""

from typing import TextIO

from edgeinfer_tui.failures import say
from edgeinfer_tui.system.terminal_calls import has_input_within
from edgeinfer_tui.text_files import decoded, read_bounded

MAX_WAIT_SECONDS = 5.0


def piped_text(stdin: TextIO | None, prompt_given: bool) -> str | None:
    """The text piped into the program, without a final newline; None on a terminal or if it is empty.

    If a prompt is on the command line, a pipe without data for 5 seconds is ignored: many programs start
    others with an open pipe that is never written.

    Raises:
        BadParameter: the input is too long or isn't UTF-8.
    """
    if stdin is None or stdin.closed or stdin.isatty():
        return None
    raw = stdin.buffer
    if prompt_given and not has_input_within(raw, MAX_WAIT_SECONDS):
        say(f"standard input had no data within {MAX_WAIT_SECONDS:.0f} s: using the prompt alone")
        return None
    text = decoded(read_bounded(raw, "standard input"), "standard input")
    return text.removesuffix("\n").removesuffix("\r") or None


def joined_prompt(prompt: str | None, piped: str | None) -> str | None:
    """Piped text first, then the prompt, separated by a blank line."""
    if prompt and piped:
        return f"{piped}\n\n{prompt}"
    return prompt or piped


def unescaped(text: str) -> str:
    r"""`\n`, `\t` and `\\` as the characters that they stand for, since a shell hardly types them."""
    for written, meant in (("\\\\", "\0"), ("\\n", "\n"), ("\\t", "\t"), ("\0", "\\")):
        text = text.replace(written, meant)
    return text
