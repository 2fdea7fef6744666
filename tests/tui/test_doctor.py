"""`edgeinfer doctor`: every probe answers or says why it can't."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from edgeinfer_tui import machine_probes
from edgeinfer_tui.doctor_report import gather, print_report
from tests.tui.conftest import CommandLine


def failing() -> Mapping[str, Any]:
    raise OSError("no such sensor")


def test_a_probe_that_fails_says_why_and_stops_no_other() -> None:
    report = gather({"broken": failing, "sound": lambda: {"cores": 2}})
    assert report == {"broken": {"error": "OSError: no such sensor"}, "sound": {"cores": 2}}


def test_the_report_for_people(capsys: pytest.CaptureFixture[str]) -> None:
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
    monkeypatch.setattr(machine_probes, "_bandwidth", lambda threads: {"threads": threads})
    report = json.loads(edgeinfer("doctor", "--json", "--threads", "3").out)
    assert list(report) == ["machine", "processor", "memory", "bandwidth", "graphics", "versions", "caches"]
    assert report["machine"]["cores"] == machine_probes.usable_cores()
    assert 0 < report["memory"]["free_bytes"] <= report["memory"]["total_bytes"]
    assert report["bandwidth"] == {"threads": 3}
    assert report["versions"]["numpy"][0].isdigit()
    assert edgeinfer("doctor").out.startswith("machine\n  system")


def test_no_threads_is_a_usage_error(edgeinfer: CommandLine) -> None:
    outcome = edgeinfer("doctor", "--threads", "0")
    assert outcome.code == 2
    assert outcome.err.startswith("edgeinfer: --threads: saw 0, wanted a whole number of at least 1")
