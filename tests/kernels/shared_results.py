"""Results that one worker of a test run computes, and that the others read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgeinfer_kernels.system.locks import file_lock

MAX_SECONDS = 600.0
"""After this time, the lock of another worker is an error."""


def made_once(path: Path, make: Callable[[], Any]) -> Any:
    """What `make` returns, in JSON's types; stored at `path` by the first worker that needs it."""
    with file_lock(path.with_suffix(".lock"), MAX_SECONDS):
        if not path.exists():
            path.write_text(json.dumps(make()), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))
