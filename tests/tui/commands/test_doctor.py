"""`edgeinfer doctor`: every check reports a result or the reason for its failure."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.engine import warming
from edgeinfer_kernels.cpu.compiler.features import choose
from edgeinfer_kernels.cpu.compiler.kernel_cache import KernelCache, object_file
from edgeinfer_kernels.cpu.compiler.kernel_units import every_unit
from edgeinfer_kernels.cuda import driver
from edgeinfer_tui.output.doctor_report import gather, print_report
from edgeinfer_tui.system import machine_probes
from tests.tui.conftest import CommandLine


def failing() -> Mapping[str, Any]:
    raise OSError("no such sensor")


def test_a_failed_check_reports_its_reason_and_the_others_run() -> None:
    report = gather({"broken": failing, "sound": lambda: {"cores": 2}})
    assert report == {"broken": {"error": "OSError: no such sensor"}, "sound": {"cores": 2}}


def test_the_report_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(
        {
            "memory": {"free_bytes": 3 << 30, "limit_bytes": None},
            "processor": {"active_kernels": "avx2", "features": ["avx2", "fma"]},
        }
    )
    assert capsys.readouterr().out == (
        "memory\n  free   3.0 GiB\n  limit  none\n\n"
        "processor\n  active kernels  avx2\n  features        avx2 fma\n"
    )


def test_doctor_reports_this_machine(edgeinfer: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_probes, "bandwidth", lambda threads: {"threads": threads})
    report = json.loads(edgeinfer("doctor", "--json", "--threads", "3").out)
    assert list(report) == [
        "machine",
        "processor",
        "memory",
        "threads",
        "bandwidth",
        "graphics",
        "links",
        "versions",
        "caches",
    ]
    assert report["machine"]["cores"] == machine_probes.usable_cores()
    assert 0 < report["memory"]["free_bytes"] <= report["memory"]["total_bytes"]
    assert report["bandwidth"] == {"threads": 3}
    assert report["threads"]["count"] >= 1
    assert "processors" in report["threads"]["why"] or "measured" in report["threads"]["why"]
    assert report["processor"]["active_kernels"].startswith(choose().name)
    assert isinstance(report["caches"]["kernel_sets"], list)
    assert report["versions"]["numpy"][0].isdigit()
    assert edgeinfer("doctor").out.startswith("machine\n  system")


def test_no_threads_is_a_usage_error(edgeinfer: CommandLine) -> None:
    outcome = edgeinfer("doctor", "--threads", "0")
    assert outcome.code == 2
    assert outcome.err.startswith("edgeinfer: --threads: saw 0, wanted a whole number of at least 1")


def test_warming_builds_the_kernels_of_a_model_once(
    edgeinfer: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    user_message: list[list[str]] = []

    def compiled(store: KernelCache, units: list[str], folder: str) -> Iterator[str]:
        user_message.append(sorted(units))
        for unit in units:
            object_file(folder, unit).write_bytes(b"code")
            yield unit

    monkeypatch.setattr(KernelCache, "compile", compiled)
    monkeypatch.setattr(warming, "user_folder", lambda kind: tmp_path)
    report = json.loads(edgeinfer("doctor", "--warm", "--model", "tiny", "--json").out)
    units = ["blocks", "rows_Q4_K", "rows_Q6_K"]
    assert report["units"] == units
    assert sorted(unit for group in user_message for unit in group) == units
    assert (report["built"], report["instruction_set"]) == (3, choose().name)
    assert report["bytes"] == 3 * (4 + 32)
    outcome = edgeinfer("doctor", "--warm", "--model", "tiny")
    assert outcome.out.splitlines()[1].startswith("kernels          3 units, 0 compiled now in 0.")
    every = json.loads(edgeinfer("doctor", "--warm", "--json").out)
    assert len(every["units"]) == 1 + len(every_unit())
    assert every["built"] == len(every["units"]) - 3


def test_warming_needs_no_model_but_a_model_needs_warming(edgeinfer: CommandLine) -> None:
    outcome = edgeinfer("doctor", "--model", "tiny")
    assert outcome.code == 2
    assert "--model says what --warm compiles; add --warm" in outcome.err
    missing = edgeinfer("doctor", "--warm", "--model", "nobody")
    assert missing.code == 1
    assert "nobody" in missing.err


def test_the_links_of_several_gpus_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [driver.Gpu(index, "RTX 3090", 86, 24 << 30) for index in range(3)]
    links = [
        driver.PeerLink(0, 1, True, True),
        driver.PeerLink(0, 2, True, False),
        driver.PeerLink(1, 2, False, False),
    ]
    monkeypatch.setattr(driver, "list_gpus", lambda: gpus)
    monkeypatch.setattr(driver, "list_links", lambda count: links)
    report = machine_probes.probes(None)["links"]()
    assert report["gpu 0 and 1"] == "peer access, NVLink"
    assert report["gpu 0 and 2"] == "peer access, PCIe"
    assert report["gpu 1 and 2"] == "no peer access"
    assert "nccl" in report
    assert "main memory" in report["layers"]


@pytest.mark.parametrize(
    ("has_access", "nccl", "used"),
    [
        (True, "nvidia-nccl-cu13 2.28", "symmetric memory"),
        (False, "nvidia-nccl-cu13 2.28", "NCCL through main memory"),
        (True, None, "unavailable"),
    ],
)
def test_what_would_add_up_partial_sums_is_shown(
    has_access: bool, nccl: str | None, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [driver.Gpu(index, "RTX 3090", 86, 24 << 30) for index in range(2)]
    monkeypatch.setattr(driver, "list_gpus", lambda: gpus)
    monkeypatch.setattr(driver, "list_links", lambda _: [driver.PeerLink(0, 1, has_access, False)])
    monkeypatch.setattr(machine_probes, "nccl_version", lambda: nccl)
    assert used in machine_probes.probes(None)["links"]()["tensor"]


def test_a_link_has_what_both_directions_have() -> None:
    class Library:
        def cuDeviceGetP2PAttribute(self, value: Any, attribute: int, first: int, second: int) -> int:  # noqa: N802
            value.contents.value = int(attribute == 2 and (first, second) != (2, 1))
            return 0

    links = driver.links_of(Library(), 3)
    assert [(link.first, link.second) for link in links] == [(0, 1), (0, 2), (1, 2)]
    assert [link.has_access for link in links] == [True, True, False]
    assert not any(link.has_atomics for link in links)
