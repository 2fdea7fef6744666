"""Persistent settings: config.toml and the environment; the command line overrides both."""

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer_tui.options.command_options import NOT_SET, CommandOption, command_options

if TYPE_CHECKING:
    from edgeinfer.tool_servers.settings import ToolServer

MODEL = "model"
TOOLS = "mcp"
"""The table of tool servers."""
PREFIX = "EDGEINFER_"
FILE_VARIABLE = "EDGEINFER_CONFIG"
"""Environment variable with the path of another settings file."""
OTHER_VARIABLES = (FILE_VARIABLE, "EDGEINFER_DEBUG", "EDGEINFER_SERVE_KEY")
MAX_QUOTE = 120
WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


@dataclass(frozen=True)
class Setting:
    """A setting, converted to the type of its option. `origin`: a file or an environment variable."""

    name: str
    value: Any
    origin: str


def filled(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a command; options that weren't given are filled from the settings.

    Raises:
        SettingError: an unknown setting or an invalid value; the text names the file or variable.
        OSError: the file can't be read.
    """
    known = read_settings()
    return {
        name: known[name].value if name in known and not _was_given(name, value) else value
        for name, value in options.items()
    }


def _was_given(name: str, value: object) -> bool:
    """Whether the option is on the command line; releases of typer return different values if it isn't."""
    option = persistent_options().get(name)
    if option is not None and option.is_switch:
        return value is True
    return value is not None and value != [] and value != ()


def read_settings(environment: Mapping[str, str] = os.environ) -> dict[str, Setting]:
    """All settings of the file and the environment; the environment overrides the file.

    Raises: as `filled`.
    """
    settings, wrong = valid_settings(environment)
    for error in wrong:
        raise error
    return settings


def valid_settings(
    environment: Mapping[str, str] = os.environ,
) -> tuple[dict[str, Setting], list[Exception]]:
    """All valid settings, and for each invalid one the exception that `read_settings` raises."""
    from edgeinfer.errors import SettingError

    settings: dict[str, Setting] = {}
    wrong: list[Exception] = []
    file = config_file(environment)
    try:
        table = _from_file(file, FILE_VARIABLE in environment)
    except (SettingError, OSError) as error:
        table = {}
        wrong.append(error)
    try:
        _tool_servers(table.pop(TOOLS, {}), file)
    except SettingError as error:
        wrong.append(error)
    given = [(key.replace("-", "_"), key, value, str(file)) for key, value in table.items()]
    variables = {name: variable_of(name) for name in setting_names()}
    given += [(n, n, environment[v], v) for n, v in variables.items() if environment.get(v)]
    for name, key, value, origin in given:
        try:
            if name not in variables:
                raise SettingError(f"{origin}: {key}: no such setting{_suggestion(name, list(variables))}")
            settings[name] = _setting(name, value, origin)
        except SettingError as error:
            wrong.append(error)
    return settings, wrong


def config_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Path of the settings file; it need not exist."""
    from edgeinfer.user_folders import user_folder

    named = environment.get(FILE_VARIABLE)
    return Path(named) if named else user_folder("config", environment=environment) / "config.toml"


def configured_tool_servers(environment: Mapping[str, str] = os.environ) -> "list[ToolServer]":
    """The tool servers of the settings file. Raises: as `filled`."""
    file = config_file(environment)
    return _tool_servers(_from_file(file, FILE_VARIABLE in environment).get(TOOLS, {}), file)


def _tool_servers(table: object, file: Path) -> "list[ToolServer]":
    from edgeinfer.tool_servers.settings import tool_servers

    return tool_servers(table, str(file)) if table else []


def variable_of(name: str) -> str:
    """The environment variable of a setting: max_tokens -> EDGEINFER_MAX_TOKENS."""
    return PREFIX + name.upper()


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """A warning for each variable that looks like a setting but isn't one."""
    names = [variable_of(name) for name in setting_names()]
    return [
        f"{variable}: no such setting{_suggestion(variable, names)}"
        for variable in sorted(environment)
        if variable.startswith(PREFIX) and variable not in (*names, *OTHER_VARIABLES)
    ]


@functools.cache
def persistent_options() -> Mapping[str, CommandOption]:
    """Name -> option of the settings besides `model`: those of `run` that don't belong to one prompt or
    file, in the order of its options.
    """
    options = command_options("run")
    return {name: one for name, one in options.items() if one.info.persistent and one.value_type is not Path}


def is_secret(name: str) -> bool:
    """Whether the value of a setting is never printed."""
    return name in persistent_options() and persistent_options()[name].info.is_secret


def setting_names() -> list[str]:
    """The names of all settings."""
    return [MODEL, *persistent_options()]


def _from_file(path: Path, must_exist: bool) -> dict[str, Any]:
    from edgeinfer.errors import SettingError
    from edgeinfer.registry.toml_files import TomlError, read_toml

    if not must_exist and not path.exists():
        return {}
    try:
        return read_toml(path)
    except TomlError as error:
        raise SettingError(str(error)) from error


def _suggestion(seen: str, names: list[str]) -> str:
    from edgeinfer.registry.near_names import nearest

    near = nearest(seen, names, limit=1)
    return f"; did you mean {near[0]}?" if near else "; `edgeinfer config` lists them"


def _setting(name: str, value: object, origin: str) -> Setting:
    from edgeinfer.errors import SettingError

    try:
        return Setting(name, _converted(name, value), origin)
    except ValueError as error:
        short = text if len(text := repr(value)) <= MAX_QUOTE else f"{text[:MAX_QUOTE]}..."
        source = origin if origin.startswith(PREFIX) else f"{origin}: {name}"
        raise SettingError(f"{source}: saw {short}, wanted {error}") from None


def _converted(name: str, value: object) -> object:
    """The value converted to its option's type; a ValueError names the expected type."""
    if name == MODEL:
        return _text(value)
    option = persistent_options()[name]
    kind = option.value_type
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        choices = [choice.value for choice in kind]
        if value not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return value
    convert: Callable[[object], object] = {
        bool: _boolean,
        int: _whole,
        float: _number,
        str: _text,
    }.get(kind, _texts)
    converted = convert(value)
    allowed = option.info.allowed
    if allowed is not None and not allowed.holds(converted) and converted != NOT_SET:
        raise ValueError(str(allowed))
    return converted


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in WORDS:
        return WORDS[value.lower()]
    raise ValueError("true or false")


def _whole(value: object) -> int:
    if isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return int(value)
        except ValueError:
            pass
    raise ValueError("a whole number")


def _number(value: object) -> float:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    raise ValueError("a number")


def _text(value: object) -> str:
    """The value as text; sizes in bytes may be given as numbers."""
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return str(value)
    raise ValueError("a text")


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return value
    raise ValueError("a list of texts")
