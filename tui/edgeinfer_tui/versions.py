"""Which release of a package is installed, without importing it."""

from importlib import metadata


def version_of(package: str) -> str:
    """The installed version, or "not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
