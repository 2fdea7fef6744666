"""When each model was loaded last, in a small file of the user's state folder.

File access times are unreliable: file systems update them rarely, and backups change them.
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from edgeinfer.user_folders import user_folder
from edgeinfer_quant_formats.system.files import write_atomically

MAX_BYTES = 1 << 20
MAX_MODELS = 1000


def _record_file() -> Path:
    return user_folder("state") / "last-used.json"


def last_used(model: Path) -> float | None:
    """When a model file was loaded last, in seconds since 1970; None: unknown."""
    return _read(_record_file()).get(_key(model))


def record_use(model: Path) -> None:
    """Record the current time for a model file. Write errors are ignored."""
    file = _record_file()
    uses = _read(file) | {_key(model): time.time()}
    recent = dict(sorted(uses.items(), key=lambda use: use[1])[-MAX_MODELS:])
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(recent))


def _key(model: Path) -> str:
    return os.path.realpath(model)


def _read(file: Path) -> dict[str, float]:
    """The record; damaged parts are ignored. A pipe or a device is never opened."""
    try:
        if not file.is_file() or file.stat().st_size > MAX_BYTES:
            return {}
        record = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(record, dict):
        return {}
    now = time.time()
    return {
        model: float(used)
        for model, used in record.items()
        if isinstance(used, int | float) and not isinstance(used, bool) and 0 < used <= now
    }
