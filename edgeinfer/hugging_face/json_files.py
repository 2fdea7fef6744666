"""The JSON files of a folder."""

import json
from pathlib import Path
from typing import Any

from edgeinfer.hugging_face.errors import folder_error

MAX_BYTES = 256 << 20


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The object in a file of the folder. Raises `FolderError`: it is missing, too long, or no object."""
    path = folder / name
    try:
        if path.stat().st_size > MAX_BYTES:
            raise folder_error(folder, f"{name}: more than {MAX_BYTES} bytes, wanted a JSON file of a model")
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise folder_error(folder, f"{name} is missing") from None
    except (ValueError, RecursionError) as error:
        raise folder_error(folder, f"{name}: {error}, wanted JSON") from None
    if not isinstance(found, dict):
        raise folder_error(folder, f"{name}: saw {type(found).__name__}, wanted a JSON object")
    return found


def optional_json(folder: Path, name: str) -> dict[str, Any]:
    """As `read_json`; empty if there is no such file."""
    return read_json(folder, name) if (folder / name).is_file() else {}
