"""Assembly of ARM kernels, compiled here, and the loops in it."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeinfer_kernels.cpu.compiler.features import INSTRUCTION_SETS

TRIPLE = "aarch64-unknown-linux-gnu"
CHILD = Path(__file__).with_name("cross_assembly.py")
FUNCTION = re.compile(r"^([A-Za-z_]\w*):")
LABEL = re.compile(r"^(\.LBB\w+):")
BRANCH = re.compile(r"^(?:b|b\.\w+|cbn?z|tbn?z)\s.*?(\.LBB\w+)")


Assemblies = dict[str, dict[str, str]]
"""Instruction set -> unit -> its assembly."""


def assemblies(units: Mapping[str, Sequence[str]]) -> Assemblies:
    """Compiled by one process for all instruction sets."""
    sets = {isa.name: isa for isa in INSTRUCTION_SETS}
    targets = [{"processor": sets[name].processor, "features": sets[name].feature_string} for name in units]
    jobs = json.dumps(list(zip(targets, units.values(), strict=True)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(CHILD), TRIPLE, jobs]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(units, json.loads(done.stdout), strict=True))


@dataclass(frozen=True)
class Loop:
    """An innermost loop: its instructions, and the function that it is in."""

    function: str
    instructions: tuple[str, ...]

    def count(self, *names: str) -> int:
        """How many instructions have one of these names."""
        counts = Counter(instruction.split()[0] for instruction in self.instructions)
        return sum(counts[name] for name in names)


def innermost_loops(text: str) -> Iterator[Loop]:
    """The loops of all functions that have no loop inside."""
    for name, lines in _functions(text):
        body, labels, spans = list[str](), dict[str, int](), list[tuple[int, int]]()
        for line in lines:
            if label := LABEL.match(line):
                labels[label[1]] = len(body)
            elif re.match(r"\t[a-z]", line):
                body.append(line.strip())
                target = BRANCH.match(body[-1])
                if target and target[1] in labels:
                    spans.append((labels[target[1]], len(body)))
        for begin, end in spans:
            if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in spans):
                yield Loop(name, tuple(body[begin:end]))


def _functions(text: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", list[str]()
    for line in text.splitlines():
        if start := FUNCTION.match(line):
            name, lines = start[1], []
        elif line.startswith(".Lfunc_end"):
            yield name, lines
        else:
            lines.append(line)
