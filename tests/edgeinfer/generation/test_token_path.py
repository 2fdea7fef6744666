"""A token passes few Python files, so that the path of baseline decoding is short to read."""

import sys
from pathlib import Path
from types import FrameType

import edgeinfer
from edgeinfer.model import Model
from edgeinfer.results import Token

ROOT = Path(edgeinfer.__file__).resolve().parents[1]
MAX_FILES = 12
PROMPT = "Once upon a time"


def files_of_a_token(model: Model) -> set[str]:
    """The files of our packages whose functions run between two tokens of a greedy completion."""
    list(model.stream(PROMPT, max_tokens=8, temperature=0.0))  # texts of tokens are cached
    stream, result = model.stream(PROMPT, max_tokens=8, temperature=0.0), set[str]()
    tokens: list[Token] = [next(stream) for _ in range(4)]

    def record(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and "tests" not in path.parts:
            result.add(str(path.relative_to(ROOT)))

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        tokens.append(next(stream))
    finally:
        sys.setprofile(before)
    stream.cancel()
    assert len(tokens) == 5
    return result


def test_a_greedy_token_on_the_cpu_passes_at_most_twelve_files() -> None:
    with edgeinfer.load("tiny", device="cpu", draft=None, threads=1) as model:
        files = files_of_a_token(model)
    assert len(files) <= MAX_FILES, sorted(files)
