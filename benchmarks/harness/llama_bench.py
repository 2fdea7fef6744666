"""llama.cpp's benchmark program `llama-bench`: runs on a file; its samples are read from its JSON."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgeinfer.benchmarking.timings import Timings
from edgeinfer.benchmarking.workloads import Workload
from edgeinfer.errors import EdgeInferError

OUTPUT_SHOWN = 300


class LlamaBench:
    """A `llama-bench` program; `arguments` follow ours."""

    def __init__(self, program: Path, arguments: Sequence[str] = ()) -> None:
        self._program = program
        self._arguments = tuple(arguments)
        self.described = ""
        """Its build and devices, known after a run."""

    def run(self, model: Path, workloads: Sequence[Workload], repetitions: int) -> list[Timings]:
        """Timings of each workload, in their order; verifying is a prompt there, with logits of its end only.

        Raises:
            EdgeInferError: the program fails, or its output has another format.
        """
        timings: dict[tuple[int, int, int], Timings] = {}
        for depth in dict.fromkeys(workload.depth for workload in workloads):
            here = [workload for workload in workloads if workload.depth == depth]
            for record in self._records(model, here, depth, repetitions):
                test = (record["n_prompt"], record["n_gen"], record["n_depth"])
                seconds = tuple(nanoseconds / 1e9 for nanoseconds in record["samples_ns"])
                timings[test] = Timings(seconds, test[0] + test[1])
        missing = [workload.name for workload in workloads if _test(workload) not in timings]
        if missing:
            raise EdgeInferError(f"{self._program}: returned no result for {', '.join(missing)}")
        return [timings[_test(workload)] for workload in workloads]

    def _records(
        self, model: Path, workloads: Sequence[Workload], depth: int, repetitions: int
    ) -> list[dict[str, Any]]:
        generated = sorted({workload.tokens for workload in workloads if workload.kind == "generate"})
        read = sorted({workload.tokens for workload in workloads if workload.kind != "generate"})
        command = [str(self._program), "-m", str(model), "-o", "json", "-r", str(repetitions)]
        command += ["-d", str(depth), "-p", _listed(read), "-n", _listed(generated), *self._arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise EdgeInferError(f"{self._program}: {error.strerror}") from error
        if done.returncode != 0:
            raise EdgeInferError(
                f"{self._program}: exit code {done.returncode}: {done.stderr.strip()[-OUTPUT_SHOWN:]}"
            )
        try:
            records: list[dict[str, Any]] = json.loads(done.stdout)
        except ValueError:
            raise EdgeInferError(
                f"{self._program}: saw {done.stdout[:OUTPUT_SHOWN]!r}, wanted JSON (-o json)"
            ) from None
        for record in records:
            device = record.get("gpu_info") or record.get("cpu_info")
            self.described = f"{record.get('backends')} on {device}, build {record.get('build_commit')}"
        return records


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers)) or "0"


def _test(workload: Workload) -> tuple[int, int, int]:
    if workload.kind == "generate":
        return 0, workload.tokens, workload.depth
    return workload.tokens, 0, workload.depth
