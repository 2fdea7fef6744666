"""Aliases of options, and uniform wording of command-line errors, independent of the release of typer."""

import inspect
import typing
from collections.abc import Iterable
from contextlib import suppress
from enum import Enum
from typing import Any

from edgeinfer.options.option_field import without_none

KINDS = {int: "a whole number", float: "a number"}
ALIASES = {
    "api-key": "key",
    "ctx-size": "context",
    "generate-tokens": "max-tokens",
    "grammar-file": "grammar",
    "json-schema-file": "json-schema",
    "mirostat-ent": "mirostat-tau",
    "mirostat-lr": "mirostat-eta",
    "n-depth": "depth",
    "n-gen": "max-tokens",
    "n-predict": "max-tokens",
    "n-prompt": "prompt-tokens",
    "predict": "max-tokens",
    "system-prompt": "system",
    "temp": "temperature",
    "typical": "typical-p",
}
"""Alias, as in llama.cpp -> the name shown in help. They work in every command."""


def canonical(name: str) -> str:
    """The name shown in help for any name of an option."""
    return ALIASES.get(name, name)


def canonical_flag(flag: str) -> str:
    return f"--{canonical(flag[2:])}" if flag.startswith("--") else flag


def rewrite_usage_error(error: Exception, command: Any, ctx: Any, args: list[str]) -> None:
    """Rewrite a usage error: what is wrong, the value given and the value expected."""
    if not hasattr(error, "format_message"):
        return
    if getattr(error, "ctx", True) is None:
        error.ctx = ctx  # type: ignore[attr-defined]
    if isinstance(getattr(error, "option_name", None), str) and hasattr(error, "possibilities"):
        _rewrite_unknown(error, command.get_params(ctx))
    elif getattr(error, "param", None) is not None and type(error).__name__ == "BadParameter":
        _rewrite_value(error, command, ctx, args)


def is_argument(param: Any) -> bool:
    """Whether a parameter is positional."""
    return bool(param.param_type_name == "argument")


def _rewrite_unknown(error: Any, params: Iterable[Any]) -> None:
    """Suggest the options nearest to an unknown one."""
    from edgeinfer.registry.near_names import nearest  # imports the library, so only on an error

    options = [param for param in params if not is_argument(param)]
    flags = [flag for option in options for flag in [*option.opts, *option.secondary_opts]]
    names = [flag for flag in flags if flag.startswith("--")]
    if error.option_name.startswith("--"):
        names += [f"--{alias}" for alias, name in ALIASES.items() if f"--{name}" in flags]
    near = list(dict.fromkeys(canonical_flag(flag) for flag in nearest(error.option_name, names)))
    shown = error.option_name if len(error.option_name) <= 60 else f"{error.option_name[:57]}..."
    error.possibilities = None
    error.message = f"No such option: {shown}" + (f"; did you mean {' or '.join(near)}?" if near else "")


def _rewrite_value(error: Any, command: Any, ctx: Any, args: list[str]) -> None:
    """Rewrite the error for an option that takes a number or one of several words."""
    annotation = annotation_of(command, error.param.name)
    expected = None if annotation is None else _expected(*annotation)
    if expected is None:
        return
    flag = error.param.opts[0] if is_argument(error.param) else _longest(error.param.opts)
    seen = _seen(error.param, command, ctx, args)
    error.param = None
    error.message = f"{flag}: saw {seen!r}, wanted {expected}"


def annotation_of(command: Any, name: str) -> tuple[Any, Any] | None:
    """The type of a parameter's values, and its typer option."""
    with suppress(TypeError, ValueError, NameError):
        parameters = inspect.signature(command.callback, eval_str=True).parameters
        if name in parameters and typing.get_origin(parameters[name].annotation) is typing.Annotated:
            hint, info, *_ = typing.get_args(parameters[name].annotation)
            return without_none(hint)[0], info
    return None


def _expected(kind: Any, info: Any) -> str | None:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(str(choice.value) for choice in kind)}"
    if kind not in KINDS:
        return None
    minimum, maximum = info.min, info.max
    if minimum is not None and maximum is not None:
        return f"{KINDS[kind]} from {minimum} to {maximum}"
    return KINDS[kind] + (f" of at least {minimum}" if minimum is not None else "")


def _seen(param: Any, command: Any, ctx: Any, args: list[str]) -> str:
    """The value of a parameter on the command line."""
    values, _, _ = command.make_parser(ctx).parse_args(args=list(args))
    value = values.get(param.name)
    shown = str(value[-1] if isinstance(value, list | tuple) and value else value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _longest(flags: Iterable[str]) -> str:
    return max(flags, key=len)
