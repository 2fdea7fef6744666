"""The programs about a GPU, on the built-in model and the CPU."""

from pathlib import Path

import pytest

from edgeinfer.benchmarking.timings import Timings
from edgeinfer.benchmarking.workloads import Workload
from edgeinfer.loading.loading import load
from harness import cuda_runs
from harness.cuda_runs import Comparison, own_seconds


def compared(kind: str, tokens: int, ours: float, theirs: float | None) -> Comparison:
    other = None if theirs is None else Timings((theirs,) * 3, tokens)
    return Comparison("8B", Workload(kind, tokens), Timings((ours,) * 3, tokens), other, 5e9)  # type: ignore[arg-type]


def test_the_table_gives_ratios_and_what_decoding_reads() -> None:
    found = [compared("generate", 128, 0.2, 0.4), compared("prompt", 512, 0.1, None)]
    lines = cuda_runs.table(found).splitlines()
    assert [cell.strip() for cell in lines[2].strip("|").split("|")] == [
        "8B", "tg128", "640.0", "320.0", "2.00x", "640.0", "320.0", "2.00x", "3200",
    ]  # fmt: skip
    assert lines[3].split("|")[4].strip() == "-"
    assert lines[3].split("|")[9].strip() == "-"


def test_widths_are_told_against_the_narrowest() -> None:
    found = [compared("verify", 1, 0.002, 0.004), compared("verify", 4, 0.003, 0.008)]
    lines = cuda_runs.widths_table(found).splitlines()
    assert "t(4)/t(1)" in lines[0]
    assert [line.split("|")[-2].strip() for line in lines[2:]] == ["1.50", "2.00"]
    assert "2.000 ms" in lines[2]


def test_every_workload_is_timed_behind_its_depth() -> None:
    workloads = [
        Workload("generate", 4, 9),
        Workload("prompt", 12, 9),
        Workload("verify", 2),
        Workload("generate", 3),
    ]
    with load("tiny", context=64, device="cpu", draft=None) as model:
        for workload in workloads:
            assert own_seconds(model, workload) > 0
            if workload.kind != "generate":
                assert len(model.engine.ids) == workload.depth + workload.tokens
        again = own_seconds(model, workloads[1])
        assert 0 < again < 10


def test_the_options_make_a_suite() -> None:
    options = cuda_runs.parser("").parse_args(
        ["--llama-bench", "there", "--types", "Q4_0, Q8_0", "--rounds", "2"]
    )
    suite = cuda_runs.suite(options)
    assert suite.types == ("Q4_0", "Q8_0")
    assert suite.rounds == 2
    assert suite.bench is not None
    assert cuda_runs.suite(cuda_runs.parser("").parse_args(["--smoke"])).models == ("tiny",)


def test_the_report_goes_to_a_file_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = cuda_runs.suite(cuda_runs.parser("").parse_args(["--smoke"]))
    cuda_runs.publish("Title", "H", suite, [("tg", "| a |")], tmp_path / "folder" / "out.md")
    told = capsys.readouterr().out
    assert told.startswith("# Title\n\n- GPU: H\n- machine: ")
    assert (tmp_path / "folder" / "out.md").read_text() == told
