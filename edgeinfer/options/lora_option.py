"""The option `lora`: paths of LoRA adapters with scales."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeinfer.errors import SettingError, shown

WANTED = "wanted an adapter's path, PATH:SCALE or (path, scale)"


@dataclass(frozen=True)
class LoraChoice:
    """An adapter, a GGUF file or a PEFT folder, and the factor of what it adds."""

    path: Path
    scale: float = 1.0

    def __str__(self) -> str:
        return str(self.path) if self.scale == 1 else f"{self.path}:{self.scale:g}"


GivenLora = str | Path | tuple[str | Path, float] | LoraChoice


def lora_choices(name: str, given: GivenLora | Iterable[GivenLora] | None) -> tuple[LoraChoice, ...]:
    """The adapters of an option's value. Raises `SettingError`."""
    if given is None:
        return ()
    if isinstance(given, str | Path | LoraChoice) or _is_pair(given):
        return (_choice(name, given),)
    try:
        choices = tuple(_choice(name, each) for each in given)
    except TypeError:
        raise SettingError(f"{name}: saw {shown(given)}, {WANTED}, or several of these") from None
    paths = [choice.path for choice in choices]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise SettingError(f"{name}: saw {shown(str(twice))} twice, wanted each adapter once with its scale")
    return choices


def _is_pair(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], int | float)


def _choice(name: str, given: Any) -> LoraChoice:
    if isinstance(given, LoraChoice):
        return _checked(name, given.path, given.scale)
    if isinstance(given, Path):
        return LoraChoice(given)
    if _is_pair(given) and isinstance(given[0], str | Path):
        return _checked(name, Path(given[0]), given[1])
    if not isinstance(given, str) or not given:
        raise SettingError(f"{name}: saw {shown(given)}, {WANTED}")
    path, colon, scale = given.rpartition(":")
    if not colon or not path or Path(given).exists():
        return LoraChoice(Path(given))
    try:
        return _checked(name, Path(path), float(scale))
    except ValueError:
        return LoraChoice(Path(given))


def _checked(name: str, path: Path, scale: float) -> LoraChoice:
    if isinstance(scale, bool) or not math.isfinite(scale):
        raise SettingError(f"{name}: saw the scale {shown(scale)}, wanted a finite number")
    return LoraChoice(path, float(scale))
