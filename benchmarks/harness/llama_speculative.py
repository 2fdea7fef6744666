"""llama.cpp's example `llama-speculative-simple`: a completion with drafts, its speed and accepted share."""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.errors import EdgeInferError

OUTPUT_SHOWN = 300
DECODED = re.compile(r"decoded +(\d+) tokens in +([\d.]+) seconds")
COUNTS = {name: re.compile(rf"{name} += (\d+)") for name in ("n_drafted", "n_accept")}


@dataclass(frozen=True)
class Drafted:
    """Tokens a second of a completion, and the share of its drafts that was accepted."""

    rate: float
    accepted: float


class LlamaSpeculative:
    """The program; `arguments` follow ours."""

    def __init__(self, program: Path, arguments: Sequence[str] = ()) -> None:
        self._program = program
        self._arguments = tuple(arguments)

    def run(self, model: Path, prompt: str, tokens: int, drafts: int) -> Drafted:
        """A greedy completion, with up to `drafts` tokens of the file's own head for each step.

        Raises:
            EdgeInferError: the program fails, or its output has another format.
        """
        command = [str(self._program), "-m", str(model), "-p", prompt, "-n", str(tokens), "--temp", "0"]
        command += ["-c", "1024", "--ignore-eos", "--spec-type", "draft-mtp"]
        command += ["--spec-draft-n-max", str(drafts), *self._arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
        except OSError as error:
            raise EdgeInferError(f"{self._program}: {error.strerror}") from error
        output = done.stdout + done.stderr
        decoded = DECODED.search(output)
        counts = [pattern.search(output) for pattern in COUNTS.values()]
        if done.returncode != 0 or decoded is None or not all(counts):
            raise EdgeInferError(
                f"{self._program}: exit code {done.returncode}: {output.strip()[-OUTPUT_SHOWN:]}"
            )
        drafted, accepted = (int(found[1]) for found in counts if found)
        return Drafted(int(decoded[1]) / float(decoded[2]), accepted / max(1, drafted))
