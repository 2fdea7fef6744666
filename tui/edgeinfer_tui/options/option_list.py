"""All options of a command as plain text, for `--help-all`: whole names, one heading per panel."""

import textwrap
from collections.abc import Iterator
from enum import Enum
from typing import Any

from edgeinfer_tui.options.option_errors import annotation_of, is_argument

COLUMN = 28
"""Column of the descriptions."""
MIN_WIDTH, MAX_WIDTH = 60, 110
PLACEHOLDERS = {int: "N", float: "X"}
ARGUMENTS, OTHERS = "Arguments", "Options"


def option_list(command: Any, ctx: Any, width: int) -> str:
    """The usage and the parameters of a command, which is click's, in at most `width` columns."""
    usage = " ".join(command.collect_usage_pieces(ctx))
    panels: dict[str, list[str]] = {}
    for param in command.get_params(ctx):
        heading = ARGUMENTS if is_argument(param) else getattr(param, "rich_help_panel", None) or OTHERS
        names = param.name.upper() if is_argument(param) else _names(command, param)
        panels.setdefault(heading, []).extend(_lines(names, param.help or "", width))
    panels[OTHERS] = panels.pop(OTHERS, [])
    parts = ["\n".join([heading, *lines]) for heading, lines in panels.items() if lines]
    return "\n\n".join([f"Usage: {ctx.command_path} {usage}", *parts])


def _lines(names: str, help: str, width: int) -> Iterator[str]:
    """The names of a parameter, and its description next to them, or below if there is too little room."""
    head = f"  {names}"
    room = min(max(width, MIN_WIDTH), MAX_WIDTH) - COLUMN
    texts = textwrap.wrap(_plain(help), room, break_on_hyphens=False)
    if len(head) + 2 > COLUMN or not texts:
        yield head
    else:
        yield f"{head:<{COLUMN}}{texts.pop(0)}"
    for text in texts:
        yield " " * COLUMN + text


def _names(command: Any, option: Any) -> str:
    """For example "-c, --context N", or "--repack, --no-repack"."""
    flags = sorted([*option.opts, *option.secondary_opts], key=lambda flag: flag.startswith("--"))
    return " ".join(filter(None, [", ".join(flags), _value(command, option)]))


def _value(command: Any, option: Any) -> str:
    """The placeholder of an option's value; "" for a flag."""
    if getattr(option, "is_flag", False) or option.metavar:
        return option.metavar or ""
    annotation = annotation_of(command, option.name)
    kind = annotation[0] if annotation else str
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(str(one.value) for one in kind)
    return PLACEHOLDERS.get(kind, "TEXT")


def _plain(help: str) -> str:
    """A help text without its markup."""
    from rich.text import Text

    return Text.from_markup(" ".join(help.split())).plain
