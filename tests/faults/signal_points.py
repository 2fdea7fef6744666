"""A program that gets a signal at a point of loading, quantizing or pulling: KIND FOLDER SIGNAL POINT."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import edgeinfer
from edgeinfer.download.http_source import RemoteFile
from edgeinfer.download.transfer import TransferCallbacks, fetch
from edgeinfer.quantizing import quantize

Progress = Callable[..., None]


def at_point(number: int, point: int) -> Progress:
    """Progress that sends the signal at its `point`-th call; -1: never."""
    left = point

    def received(*_: object) -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), number)
        left -= 1

    return received


def load(folder: Path, progress: Progress) -> None:
    with edgeinfer.load(
        folder / "model.gguf", device="cpu", threads=1, draft=None, progress=progress
    ) as model:
        print(model.generate([1, 5, 6], max_tokens=4, temperature=0).ids)


def make(folder: Path, progress: Progress) -> None:
    result = quantize(folder / "model.gguf", folder / "small.gguf", "Q8_0", overwrite=True, progress=progress)
    print(result is not None)


def pull(folder: Path, progress: Progress) -> None:
    url = (folder / "url").read_text()
    fetch(
        RemoteFile(url, "model.gguf"), folder / "pulled" / "model.gguf", TransferCallbacks(progress=progress)
    )
    print((folder / "pulled" / "model.gguf").stat().st_size)


if __name__ == "__main__":
    kind, folder, number, point = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        {"load": load, "quantize": make, "pull": pull}[kind](folder, at_point(number, point))
    except KeyboardInterrupt:
        sys.exit(130)
