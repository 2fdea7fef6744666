"""Checks for packages of extras, before a command does something that takes time."""

from importlib.util import find_spec

SERVER_PACKAGES = ("starlette", "prometheus-client")


def check_server_packages(command: str, *more: str) -> None:
    """Raise `SettingError` if packages of the server are missing."""
    from edgeinfer.errors import SettingError

    missing = [name for name in (*SERVER_PACKAGES, *more) if find_spec(name.replace("-", "_")) is None]
    if missing:
        raise SettingError(
            f"{command}: needs {', '.join(missing)}, not installed here; pip install 'edgeinfer[serve]'"
        )
