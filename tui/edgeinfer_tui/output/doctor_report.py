"""The report of `doctor`: the result of each probe, or its error. Probes are known by name only."""

from collections.abc import Callable, Mapping
from typing import Any

from edgeinfer_tui.output.columns import one_line, print_pairs, shown_bytes

WIDEST = 1000

Probes = Mapping[str, Callable[[], Mapping[str, Any]]]


def gather(probes: Probes) -> dict[str, dict[str, Any]]:
    """Run each probe; a probe that fails reports {"error": reason} and doesn't stop the others."""
    report: dict[str, dict[str, Any]] = {}
    for name, probe in probes.items():
        try:
            report[name] = dict(probe())
        except Exception as error:
            report[name] = {"error": f"{type(error).__name__}: {error}"}
    return report


def print_report(report: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the report as text: a heading for each probe, its results below."""
    for index, (name, findings) in enumerate(report.items()):
        if index:
            print()
        print(name)
        print_pairs([(f"  {_label(key)}", _shown(key, value)) for key, value in findings.items()])


def _label(key: str) -> str:
    return key.removesuffix("_bytes").replace("_", " ") + (" size" if key.endswith("s_bytes") else "")


def _shown(key: str, value: Any) -> str:
    if value is None or value == []:
        return "none"
    if key.endswith("_bytes"):
        return shown_bytes(value)
    if isinstance(value, list | tuple):
        value = " ".join(map(str, value))
    return one_line(value, WIDEST)
