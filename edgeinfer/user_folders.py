"""The platform's folders for a user's data, settings, state and caches."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Literal

Kind = Literal["data", "config", "state", "cache"]

XDG: dict[Kind, tuple[str, str]] = {
    "data": ("XDG_DATA_HOME", ".local/share"),
    "config": ("XDG_CONFIG_HOME", ".config"),
    "state": ("XDG_STATE_HOME", ".local/state"),
    "cache": ("XDG_CACHE_HOME", ".cache"),
}


def user_folder(
    kind: Kind,
    *,
    platform: str = sys.platform,
    environment: Mapping[str, str] = os.environ,
    home: Path | None = None,
) -> Path:
    """The folder for `edgeinfer`'s files of one kind; it need not exist yet.

    The variables of the XDG base directory specification (which says to ignore relative paths) are followed
    everywhere. Without them, Linux and the BSDs use its folders, macOS ~/Library, Windows %LOCALAPPDATA%.
    """
    home = home or _home()
    variable, usual = XDG[kind]
    given = environment.get(variable, "")
    if PurePath(given).is_absolute():
        return Path(given) / "edgeinfer"
    if platform == "darwin":
        base = home / "Library" / ("Caches" if kind == "cache" else "Application Support")
        return base / "edgeinfer"
    if platform == "win32":
        local = Path(environment.get("LOCALAPPDATA") or home / "AppData" / "Local")
        return local / "edgeinfer" / kind
    return home / usual / "edgeinfer"


def _home() -> Path:
    """The home folder. If there is none, the null device: no file is found or saved there."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.devnull)
