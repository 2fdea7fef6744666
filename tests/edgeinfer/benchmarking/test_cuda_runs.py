"""The GPU benchmark programs, on the built-in model and the CPU."""

from edgeinfer.benchmarking.timings import Timings
from edgeinfer.benchmarking.workloads import Workload
from edgeinfer.loading.loading import load
from harness import cuda_runs
from harness.cuda_runs import Comparison, workload_seconds


def compared(kind: str, tokens: int, ours: float, theirs: float | None) -> Comparison:
    other = None if theirs is None else Timings((theirs,) * 3, tokens)
    return Comparison("8B", Workload(kind, tokens), Timings((ours,) * 3, tokens), other, 5e9)  # type: ignore[arg-type]


def test_the_table_has_ratios_and_bytes_read_per_token() -> None:
    result = [compared("generate", 128, 0.2, 0.4), compared("prompt", 512, 0.1, None)]
    lines = cuda_runs.table(result).splitlines()
    assert [cell.strip() for cell in lines[2].strip("|").split("|")] == [
        "8B", "tg128", "640.0", "320.0", "2.00x", "640.0", "320.0", "2.00x", "3200",
    ]  # fmt: skip
    assert lines[3].split("|")[4].strip() == "-"
    assert lines[3].split("|")[9].strip() == "-"


def test_every_workload_is_timed_after_its_depth() -> None:
    workloads = [
        Workload("generate", 4, 9),
        Workload("prompt", 12, 9),
        Workload("verify", 2),
        Workload("generate", 3),
    ]
    with load("tiny", context=64, device="cpu", draft=None) as model:
        for workload in workloads:
            assert workload_seconds(model, workload) > 0
            if workload.kind != "generate":
                assert len(model.engine.ids) == workload.depth + workload.tokens
        again = workload_seconds(model, workloads[1])
        assert 0 < again < 10
