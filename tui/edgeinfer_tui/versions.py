"""Versions of installed packages, without importing them."""

from importlib import metadata


def version_of(package: str) -> str:
    """The installed version, or "not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
