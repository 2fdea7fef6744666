"""llama-bench as a benchmark target, replaced by a script."""

import json
import sys
from pathlib import Path

import pytest

from edgeinfer.benchmarking.workloads import Workload
from edgeinfer.errors import EdgeInferError
from harness.llama_bench import LlamaBench

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="scripts are no programs there")
SCRIPT = """#!{python}
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
records = []
for kind in ("-p", "-n"):
    for tokens in map(int, options[kind].split(",")):
        if tokens:
            prompt, generated = (tokens, 0) if kind == "-p" else (0, tokens)
            records.append(dict(n_prompt=prompt, n_gen=generated, n_depth=int(options["-d"]), gpu_info="H",
                                backends="CUDA", build_commit="abc",
                                samples_ns=[tokens * 1000000] * int(options["-r"])))
with open(sys.argv[0] + ".log", "a") as log:
    log.write(json.dumps(sys.argv[1:]) + chr(10))
print(json.dumps(records))
"""


def program(folder: Path, text: str) -> Path:
    path = folder / "llama-bench"
    path.write_text(text.replace("{python}", sys.executable))
    path.chmod(0o755)
    return path


def test_samples_are_read_in_the_order_of_the_workloads(tmp_path: Path) -> None:
    bench = LlamaBench(program(tmp_path, SCRIPT), ["-ngl", "99"])
    expected = [
        Workload("generate", 128, 512), Workload("prompt", 512), Workload("verify", 4),
        Workload("generate", 128),
    ]  # fmt: skip
    result = bench.run(Path("model.gguf"), expected, 3)
    assert [timings.tokens for timings in result] == [128, 512, 4, 128]
    assert result[1].seconds == (0.512,) * 3
    assert result[0].mean_rate == pytest.approx(1000)
    assert bench.described == "CUDA on H, build abc"
    calls = [json.loads(line) for line in (tmp_path / "llama-bench.log").read_text().splitlines()]
    assert len(calls) == 2
    assert calls[1][calls[1].index("-p") + 1] == "4,512"
    assert calls[0][calls[0].index("-p") + 1] == "0"
    assert all(call[-2:] == ["-ngl", "99"] for call in calls)


def test_the_output_of_a_failed_program_is_quoted(tmp_path: Path) -> None:
    bench = LlamaBench(program(tmp_path, "#!{python}\nimport sys\nsys.exit('no CUDA device')\n"))
    with pytest.raises(EdgeInferError, match="exit code 1: no CUDA device"):
        bench.run(Path("model.gguf"), [Workload("prompt", 8)], 1)


def test_a_missing_test_is_named(tmp_path: Path) -> None:
    bench = LlamaBench(program(tmp_path, "#!{python}\nprint('[]')\n"))
    with pytest.raises(EdgeInferError, match="returned no result for pp8"):
        bench.run(Path("model.gguf"), [Workload("prompt", 8)], 1)
