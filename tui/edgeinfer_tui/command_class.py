"""Command classes that add llama.cpp option names, suggestions for unknown options, and shorter help."""

import os
from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from edgeinfer_tui.options.option_errors import canonical_flag, is_argument, rewrite_usage_error
from edgeinfer_tui.output.terminal_output import help_output

PLACEMENT = "edgeinfer plans what goes to the GPU, see edgeinfer plan; limit its memory with --vram SIZE"
REFUSED = {
    **dict.fromkeys(("-ngl", "--n-gpu-layers", "--gpu-layers"), PLACEMENT),
    **dict.fromkeys(("-ot", "--override-tensor", "-ts", "--tensor-split"), PLACEMENT),
    **dict.fromkeys(("-ncmoe", "--n-cpu-moe", "-cmoe", "--cpu-moe"), PLACEMENT),
    **dict.fromkeys(("-sm", "--split-mode", "-nkvo", "--no-kv-offload"), PLACEMENT),
    **dict.fromkeys(("-mg", "--main-gpu"), "name the GPU with --device cuda:N"),
    "-m": "the model has no flag: edgeinfer run MODEL, where MODEL is a name or the path of a .gguf file",
}
"""Options of llama.cpp that edgeinfer doesn't have -> alternative to suggest."""


class _OptionReader:
    """Hides the type of flags in help, and explains refused or unknown options."""

    def get_params(self: Any, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""  # a flag takes no value, so help should not show its type
        return params

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        with help_output():
            super().format_help(ctx, formatter)  # type: ignore[misc]

    def parse_args(self: Any, ctx: Any, args: list[str]) -> Any:
        try:
            return super().parse_args(ctx, list(args))  # type: ignore[misc]
        except Exception as error:
            rewrite_usage_error(error, self, ctx, args)
            raise


class EdgeInferCommand(_OptionReader, TyperCommand):
    """A command."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        if ctx.resilient_parsing:  # shell completion
            return super().parse_args(ctx, args)
        refuse(args, self.get_params(ctx), ctx)
        remainder = super().parse_args(ctx, args)
        check_texts(ctx)
        return remainder


class EdgeInferGroup(_OptionReader, TyperGroup):
    """The program with its commands."""


def refuse(args: list[str], params: Iterable[Any], ctx: Any) -> None:
    """Raise `BadParameter` for an unsupported llama.cpp option; option values are not checked."""
    with_value = {flag for param in params if _takes_value(param) for flag in param.opts}
    before = ""
    for arg in args:
        if arg == "--":
            return
        flag = arg.partition("=")[0]
        if flag in REFUSED and canonical_flag(before) not in with_value:
            raise typer.BadParameter(f"{flag}: {REFUSED[flag]}", ctx=ctx)
        before = arg


def check_texts(ctx: Any) -> None:
    """Raise `BadParameter` for a value that isn't UTF-8, unless it is the path of a file."""
    for name, value in ctx.params.items():
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str) and not text.isascii() and not _is_utf8(text):
                shown = ascii(text) if len(text) <= 60 else f"{ascii(text)[:57]}..."
                flag = name.rstrip("_").replace("_", "-")
                raise typer.BadParameter(f"{flag}: saw {shown}, wanted a text in UTF-8", ctx=ctx)


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # command-line bytes that aren't UTF-8
        return "\0" not in text and os.path.exists(text)
    return True


def _takes_value(param: Any) -> bool:
    return not is_argument(param) and not getattr(param, "is_flag", False)
