"""The outcomes of many damaged inputs: counts, and every input without a clear error."""

import json
import os
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from edgeinfer.errors import EdgeInferError
from edgeinfer_quant_formats import FormatError

ROOT = Path(__file__).resolve().parents[2]
CLEAR_ERRORS = (EdgeInferError, FormatError, OSError)
MAX_MESSAGE_CHARACTERS = 1500
Case = tuple[str, Callable[[], object]]


def outcome(work: Callable[[], object]) -> tuple[str, str]:
    """("ok" or the name of a clear error, "") or ("unexpected", what happened)."""
    try:
        work()
    except CLEAR_ERRORS as error:
        text = str(error)
        if len(text) > MAX_MESSAGE_CHARACTERS or "\n" in text:
            return "unexpected", f"a message of {len(text)} characters: {text[:80]!r}"
        return type(error).__name__, ""
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return "unexpected", f"{type(error).__name__}: {str(error)[:80]} ({frame.filename}:{frame.lineno})"
    return "ok", ""


def report(cases: Iterable[Case], path: Path) -> None:
    """Run the cases; write each name before it runs, and at the end counts and what was unexpected."""
    counts: Counter[str] = Counter()
    unexpected: dict[str, str] = {}
    for name, work in cases:
        path.with_suffix(".running").write_text(name, encoding="utf-8")
        kind, why = outcome(work)
        counts[kind] += 1
        if why:
            unexpected[name] = why
    path.write_text(json.dumps({"counts": counts, "unexpected": unexpected}), encoding="utf-8")


def run_in_child(module: str, folder: Path, *arguments: str, seconds: float = 900) -> Counter[str]:
    """Run `python -m module folder arguments`, which ends with `report`; its counts.

    A crash or a hang of the child fails with the name of the case that ran.
    """
    path = folder / "report.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    command = [sys.executable, "-X", "faulthandler", "-m", module, str(folder), *arguments]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"hangs at {path.with_suffix('.running').read_text()}") from None
    running = path.with_suffix(".running")
    at = running.read_text(encoding="utf-8") if running.exists() else "the start"
    assert ended.returncode == 0, f"exit code {ended.returncode} at {at}: {ended.stderr[-2000:]}"
    result = json.loads(path.read_text(encoding="utf-8"))
    print(module, dict(result["counts"]))
    assert result["unexpected"] == {}
    return Counter(result["counts"])
