"""Options of the commands, derived from the fields of the option classes."""

import functools
import inspect
import shutil
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import BadParameter

from edgeinfer.errors import shown
from edgeinfer.options import LoadOptions, RunOptions, SamplingParams
from edgeinfer.options.load_options import MODEL, PROMPT
from edgeinfer.options.option_field import (
    OptionInfo,
    Range,
    default_of,
    options_of,
    types_of,
    without_none,
)
from edgeinfer.options.sampling_params import GENERATION, SAMPLERS
from edgeinfer_tui.failures import reporting
from edgeinfer_tui.options.option_list import option_list
from edgeinfer_tui.options.terminal_options import DISPLAY, REPORTS, TerminalOptions

Command = Callable[..., None]
OptionClass = type[RunOptions] | type[TerminalOptions] | type[LoadOptions] | type[SamplingParams]
CLASSES: tuple[OptionClass, ...] = (RunOptions, TerminalOptions, LoadOptions, SamplingParams)
PANELS = (GENERATION, PROMPT, DISPLAY, MODEL, SAMPLERS, REPORTS)
"""Headings of `--help`, in their order."""
NOT_SET = -1
"""Value of `--max-tokens` and `--seed` as in llama.cpp: no limit, and a random seed."""
MAX_LISTED = 20
"""`--help` of a command with more options lists the common ones only."""


@dataclass(frozen=True, eq=False)
class CommandOption:
    """One option of the command line."""

    name: str
    """Name of its field, of the command's parameter and of its setting."""
    owner: OptionClass
    info: OptionInfo
    hint: Any
    """Type of its field without None."""
    default: Any

    @property
    def flags(self) -> tuple[str, ...]:
        return self.info.flags or (f"--{self.name.replace('_', '-')}",)

    @property
    def is_switch(self) -> bool:
        """Whether it can only be switched on."""
        return self.hint is bool and self.default is False

    @functools.cached_property
    def value_type(self) -> Any:
        """The type of its value on the command line."""
        if self.info.argument != "value":
            return {"file": Path, "size": str}[self.info.argument]
        origin, parts = typing.get_origin(self.hint), typing.get_args(self.hint)
        if origin is Literal and isinstance(parts[0], str):
            return StrEnum(self.name, [(text, text) for text in parts])
        if origin is Literal:
            return type(parts[0])
        if origin is typing.Union:  # a text, or an object that only Python can pass
            return parts[0]
        if origin is tuple:
            return list[parts[0]] if parts[0] is Path else list[str]  # type: ignore[valid-type]
        return self.hint if origin is None else list[str]

    def annotation(self, hidden: bool = False) -> Any:
        """The typer annotation of the command's parameter; `hidden`: `--help` omits it."""
        is_path = self.value_type in (Path, list[Path])
        option = typer.Option(
            *self.flags,
            metavar=self.info.metavar,
            help=self._help(),
            rich_help_panel=self.info.panel,
            show_default=False,
            hidden=hidden,
            exists=is_path,
            dir_okay=not is_path,
        )
        return Annotated[self.value_type if self.is_switch else self.value_type | None, option]

    @property
    def shown_default(self) -> str:
        """The default as text, and what it means; "" for an empty one."""
        default, note = self.default, self.info.default_note
        if isinstance(default, tuple):
            default = " ".join(text.replace("\n", "\\n") for text in default)
        if default in (None, "", {}) or isinstance(default, bool):
            return note
        return f"{default}: {note}" if note else str(default)

    def _help(self) -> str:
        """The help text, with the default."""
        text = self.info.help.replace("[", "\\[")
        return f"{text} [dim]({self.shown_default})[/]" if self.shown_default else text

    def check_value(self, value: Any) -> None:
        """Raise `BadParameter` for an integer below its minimum, and for a text that isn't allowed."""
        allowed = self.info.allowed
        if isinstance(value, str) and allowed is not None and not allowed.holds(value):
            raise BadParameter(f"{self.flags[0]}: saw {shown(value)}, wanted {allowed}")
        if not isinstance(allowed, Range) or not allowed.whole or not isinstance(value, int):
            return
        if value < allowed.low and (value != NOT_SET or self.name not in ("max_tokens", "seed")):
            expected = f"a whole number of at least {allowed.low:g}"
            raise BadParameter(f"{self.flags[0]}: saw {value}, wanted {expected}")


@functools.cache
def all_options() -> tuple[CommandOption, ...]:
    """The options of all commands, in the order of `--help`."""
    options = []
    for kind in CLASSES:
        owner: Any = kind
        for name, info in options_of(owner).items():
            if info.commands:
                hint = without_none(types_of(owner)[name])[0]
                options.append(CommandOption(name, kind, info, hint, default_of(kind, name)))
    return tuple(sorted(options, key=lambda one: PANELS.index(one.info.panel)))


@functools.cache
def command_options(command: str) -> Mapping[str, CommandOption]:
    """Name -> option of a command."""
    return {one.name: one for one in all_options() if command in one.info.commands.split()}


def command(name: str, help: str | None = None) -> Callable[[Command], Command]:
    """Decorator that makes a function the command `name`, with the shared options after the parameters of its
    own; its exceptions become one line and an exit code.

    Options that aren't in the command's signature are passed in `**keywords`. An option that isn't given is
    None, so that the library's default applies; a switch is False. `help`: instead of the docstring.
    """

    def with_options(body: Command) -> Command:
        shared = command_options(name)
        reported = reporting(body)

        @functools.wraps(body)
        def wrapped(*positional: Any, **given: Any) -> None:
            given.pop(HELP_ALL, None)
            for name, value in given.items():
                if name in shared:
                    shared[name].check_value(value)
            plain = {name: plain_value(value) for name, value in given.items()}
            reported(*positional, **plain)

        whole = _with_shared(inspect.signature(body, eval_str=True), shared)
        wrapped.__signature__ = whole  # type: ignore[attr-defined]
        wrapped.__doc__ = help or body.__doc__
        wrapped.command_name = name  # type: ignore[attr-defined]
        wrapped.__annotations__ = {name: one.annotation for name, one in whole.parameters.items()}
        return wrapped

    return with_options


def _with_shared(signature: inspect.Signature, shared: Mapping[str, CommandOption]) -> inspect.Signature:
    """The signature of a command with its shared options instead of `**keywords`."""
    own = [
        one
        for name, one in signature.parameters.items()
        if one.kind is not one.VAR_KEYWORD and name not in shared
    ]
    has_hidden = len(shared) > MAX_LISTED
    taken = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if one.is_switch else None,
            annotation=one.annotation(hidden=has_hidden and not one.info.common),
        )
        for name, one in shared.items()
    ]
    if has_hidden:
        taken.append(
            inspect.Parameter(HELP_ALL, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=HelpAll)
        )
    return signature.replace(parameters=[*own, *taken])


def _print_all_help(invocation: typer.Context, requested: bool) -> None:
    """Print the help with all options and end the program."""
    if not requested:
        return
    print(option_list(invocation.command, invocation, shutil.get_terminal_size().columns))
    raise typer.Exit


HELP_ALL = "help_all"
HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all",
        help="Show all options: samplers, speculative decoding, chat templates and others.",
        callback=_print_all_help,
        is_eager=True,
        show_default=False,
    ),
]


def plain_value(value: Any) -> Any:
    """The text of an enumeration's member; other values unchanged."""
    return value.value if isinstance(value, StrEnum) else value
