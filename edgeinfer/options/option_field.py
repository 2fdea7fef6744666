"""Fields of option classes: default, help and limits, from which keywords, flags and settings derive.

Python keywords, the command line, the settings file, the environment and the server's fields take names,
types and limits of an option from its field. This module imports neither numpy nor the engine, so that
`edgeinfer --help` stays fast.
"""

import functools
import math
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from numbers import Real
from types import UnionType
from typing import Any, Literal, Protocol

from edgeinfer.errors import SettingError, shown

MAX_WHOLE = 2**63 - 1
"""Integers beyond this are out of every range."""

Progress = Callable[[int, int], None]
"""Called with what is done and the total."""


class Allowed(Protocol):
    """The allowed values of an option; as text, what is wanted."""

    def holds(self, value: object) -> bool:
        """Whether a value is allowed."""
        ...


@dataclass(frozen=True)
class Range:
    """The allowed numbers of an option; `low` itself is excluded if `above` is set."""

    low: float = -math.inf
    high: float = math.inf
    whole: bool = False
    above: bool = False

    def holds(self, value: object) -> bool:
        """Whether `value` is a number of the right type, finite and within the bounds."""
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            return False
        if isinstance(value, int) and abs(value) > MAX_WHOLE:
            return False
        if not math.isfinite(value) or value > self.high:
            return False
        return value > self.low if self.above else value >= self.low

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        if self.low == -math.inf:
            return "a finite number"
        if self.high < math.inf:
            return f"{kind} from {self.low:g} to {self.high:g}"
        return f"{kind} above {self.low:g}" if self.above else f"{kind} of at least {self.low:g}"


def whole(low: float = 0, high: float = math.inf) -> Range:
    """The integers from `low` to `high`."""
    return Range(low, high, whole=True)


@dataclass(frozen=True, eq=False)
class OptionInfo:
    """What the interfaces need of an option besides its name, type and default."""

    help: str
    allowed: Allowed | None = None
    convert: Callable[[str, Any], Any] | None = None
    """(name, value of the caller) -> value of the field; raises `SettingError`."""
    flags: tuple[str, ...] = ()
    """Flags of the command line; empty: `--` and the name."""
    metavar: str | None = None
    panel: str = ""
    """Heading of the option in `--help`."""
    commands: str = ""
    """Commands that take the option, separated by blanks; "": none does."""
    common: bool = False
    """Whether `--help` of a command with many options lists it; `--help-all` lists all."""
    default_note: str = ""
    """What the default means, for `--help`, as "off"; without it a default is shown by its value."""
    argument: Literal["value", "size", "file"] = "value"
    """How the command line takes it: `file`: its value is the text of a file, `size`: bytes as 8GiB."""
    persistent: bool = True
    """Whether the settings file and the environment may set it."""
    is_secret: bool = False
    """Whether its value is never printed."""
    server: bool = False
    """Whether it is a field of the server's requests under its own name."""


def option(default: Any, help: str, *, default_factory: Any = MISSING, **info: Any) -> Any:
    """A dataclass field with the `OptionInfo` of these keywords in its metadata."""
    metadata = {"option": OptionInfo(help, **info)}
    if default_factory is not MISSING:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def options_of(kind: Any) -> Mapping[str, OptionInfo]:
    """Name -> information of the options of a class, in the order of its fields."""
    return _options_of(kind)


@functools.cache
def _options_of(kind: Any) -> Mapping[str, OptionInfo]:
    return {one.name: one.metadata["option"] for one in fields(kind) if "option" in one.metadata}


@functools.cache
def types_of(kind: Any) -> Mapping[str, Any]:
    """Name -> type of the fields of an option class."""
    return typing.get_type_hints(kind)


def default_of(kind: type, name: str) -> Any:
    """The default of an option."""
    option = next(one for one in fields(kind) if one.name == name)
    return option.default if option.default_factory is MISSING else option.default_factory()


def without_none(hint: Any) -> tuple[Any, bool]:
    """A type without None, and whether it had None."""
    if isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union:
        others = tuple(part for part in typing.get_args(hint) if part is not type(None))
        return (others[0] if len(others) == 1 else typing.Union[others]), True  # noqa: UP007
    return hint, False


@functools.cache
def _typed_options(kind: Any) -> Sequence[tuple[str, OptionInfo, Any, bool]]:
    """The options of a class: the name, the information, the type without None, and whether it had None."""
    return [(name, info, *without_none(types_of(kind)[name])) for name, info in options_of(kind).items()]


def check_options(options: Any) -> None:
    """Check the values of an option object against the types and limits of its fields.

    numpy numbers become Python numbers.

    Raises:
        SettingError: the option, the value seen and the value wanted.
    """
    kind: Any = type(options)
    for name, info, hint, optional in _typed_options(kind):
        value = plain_number(getattr(options, name))
        object.__setattr__(options, name, value)
        if value is None and optional:
            continue
        expected = _expected(hint, info.allowed, value)
        if expected is not None:
            or_none = ", or None" if optional else ""
            raise SettingError(f"{name}: saw {shown(value)}, wanted {expected}{or_none}")


def _expected(hint: Any, allowed: Allowed | None, value: object) -> str | None:
    """What an option expects; None: the value is valid."""
    if allowed is not None:
        return None if allowed.holds(value) else str(allowed)
    if typing.get_origin(hint) is Literal:
        allowed_values = typing.get_args(hint)
        is_allowed = any(type(value) is type(one) and value == one for one in allowed_values)
        return None if is_allowed else f"one of {', '.join(map(repr, allowed_values))}"
    if hint is bool:
        return None if isinstance(value, bool) else "True or False"
    if hint is str:
        return None if isinstance(value, str) else "a text"
    if typing.get_origin(hint) is typing.get_origin(Progress):
        return None if callable(value) else "a function"
    return None


def check_names(given: Mapping[str, Any], *kinds: type, without: tuple[str, ...] = ()) -> None:
    """Raise `SettingError` for a keyword that is no option of `kinds`, with the nearest one that is."""
    known = [name for kind in kinds for name in options_of(kind) if name not in without]
    for name in given:
        if name not in known:
            from edgeinfer.registry.near_names import nearest  # imports difflib, so only on an error

            near = nearest(name, known, limit=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise SettingError(f"{name}: no such option; {hint}")


Options = typing.TypeVar("Options")


def options_from(kind: Callable[..., Options], given: Mapping[str, Any]) -> Options:
    """The options of one class among a caller's keywords, converted and checked.

    Raises:
        SettingError: an invalid value.
    """
    values = {}
    for name, info in options_of(kind).items():
        if name in given:
            values[name] = info.convert(name, given[name]) if info.convert else given[name]
    return kind(**values)


def texts(name: str, given: object) -> tuple[str, ...]:
    """A text or several as a tuple; None: empty. Raises `SettingError` for other types."""
    if given is None or isinstance(given, str):
        return () if given is None else (given,)
    if not isinstance(given, Iterable):
        raise SettingError(f"{name}: saw {shown(given)}, wanted a text, or a list of texts")
    return tuple(given)


def plain_number(value: Any) -> Any:
    """The `int` or `float` value of a numpy scalar; other values unchanged. Doesn't import numpy."""
    if type(value).__module__ == "numpy" and issubclass(type(value), Real):
        return value.item()
    return value
