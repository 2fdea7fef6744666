"""How fast this machine reads memory, measured once and remembered."""

import json
import os
import platform
import tempfile
from pathlib import Path

from edgeinfer_kernels.cpu.bandwidth import read_bandwidth as measure_reading
from edgeinfer_kernels.cpu.features import choose, detect, usable_cpus
from edgeinfer_kernels.cpu.objects import load_kernels


def read_bandwidth(cache_folder: Path, threads: int | None = None) -> float:
    """Bytes per second that `threads` (None: all usable) read together from main memory, measured now (0.5
    s).
    """
    kernels = load_kernels(cache_folder, choose(), ())
    return measure_reading(kernels, threads or usable_cpus())


def remembered_bandwidth(cache_folder: Path, threads: int) -> float:
    """`read_bandwidth`, measured on first use and kept beside the kernels for this processor."""
    file = cache_folder / "bandwidth.json"
    key = f"{platform.node()} {detect().name} {threads} threads"
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not measured yet, or damaged: measure again
        known = {}
    if not isinstance(known, dict) or not isinstance(known.get(key), int | float):
        measured = read_bandwidth(cache_folder, threads)
        known = {**(known if isinstance(known, dict) else {}), key: measured}
        _replace(file, json.dumps(known))
    return float(known[key])


def _replace(file: Path, text: str) -> None:
    """Write the file whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        out.write(text)
    os.replace(name, file)
