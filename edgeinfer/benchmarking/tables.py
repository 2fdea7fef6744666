"""Result tables: Markdown that is readable as plain text, CSV, and JSON records."""

import csv
import io
from collections.abc import Collection, Sequence
from typing import Any

from edgeinfer.benchmarking.machine import Machine
from edgeinfer.benchmarking.speed_runs import BenchedModel, SpeedRow, VersusRow
from edgeinfer.benchmarking.timings import BEST_DECILE, MAX_SPREAD, MEDIAN, Timings

NOTHING = "-"
SPEED_HEAD = (
    "model", "size", "params", "threads", "test", "t/s", "GB/s", "of bandwidth", "first token", "peak memory"
)  # fmt: skip
VERSUS_HEAD = (
    "model", "threads", "test", "best decile t/s", "llama.cpp", "ratio", "median t/s", "llama.cpp", "ratio",
    "GB/s", "of bandwidth",
)  # fmt: skip


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """A Markdown table with padded cells; the columns numbered in `left` are left-aligned, the others
    right.
    """
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [
        ("-" * (width + 2)) if column in left else ("-" * (width + 1) + ":")
        for column, width in enumerate(widths)
    ]
    return "\n".join([line(head), f"|{'|'.join(rule)}|", *map(line, rows)])


def shown_rate(rate: float) -> str:
    """Tokens per second with at least three digits."""
    return f"{rate:.0f}" if rate >= 1000 else f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}"


def _optional_cell(value: float | None, shown: str) -> str:
    return NOTHING if value is None else shown.format(value)


def shown_milliseconds(seconds: float) -> str:
    """A time in milliseconds with at least three digits."""
    milliseconds = seconds * 1e3
    digits = 0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2 if milliseconds >= 1 else 3
    return f"{milliseconds:.{digits}f} ms"


def speed_cells(model: BenchedModel, row: SpeedRow) -> list[str]:
    """One row under SPEED_HEAD."""
    timings = row.timings
    return [
        model.name,
        f"{model.size_bytes / 2**20:.1f} MiB",
        f"{model.parameters / 1e6:.1f} M",
        str(row.threads),
        row.workload.name,
        f"{shown_rate(timings.mean_rate)} ± {shown_rate(timings.deviation)}",
        _optional_cell(row.gigabytes_per_second, "{:.2f}"),
        _optional_cell(row.bandwidth_share, "{:.0%}"),
        NOTHING if row.seconds_to_first_token is None else shown_milliseconds(row.seconds_to_first_token),
        f"{row.peak_resident_bytes / 2**20:.0f} MiB",
    ]


def versus_cells(model: BenchedModel, row: VersusRow) -> list[str]:
    """One row under VERSUS_HEAD."""
    cells = [model.name, str(row.threads), row.workload.name]
    for share in (BEST_DECILE, MEDIAN):
        cells += [shown_rate(row.ours.rate_at(share)), shown_rate(row.theirs.rate_at(share))]
        cells.append(f"{row.ratio(share):.2f}x")
    return [
        *cells,
        _optional_cell(row.gigabytes_per_second, "{:.2f}"),
        _optional_cell(row.bandwidth_share, "{:.0%}"),
    ]


def speed_table(model: BenchedModel, rows: Sequence[SpeedRow]) -> str:
    """Repeated runs in Markdown."""
    return markdown(SPEED_HEAD, [speed_cells(model, row) for row in rows], left=(0, 4))


def versus_table(results: Sequence[tuple[BenchedModel, VersusRow]]) -> str:
    """Interleaved runs in Markdown."""
    return markdown(VERSUS_HEAD, [versus_cells(model, row) for model, row in results], left=(0, 2))


def speed_record(row: SpeedRow) -> dict[str, Any]:
    """One row as JSON values in base units."""
    return {
        **_workload_record(row),
        "tokens_per_second": row.timings.mean_rate,
        "tokens_per_second_deviation": row.timings.deviation,
        "spread": row.timings.spread,
        "too_noisy": row.timings.is_noisy,
        "seconds": list(row.timings.seconds),
        "gigabytes_per_second": row.gigabytes_per_second,
        "bandwidth_share": row.bandwidth_share,
        "read_bandwidth_gigabytes_per_second": row.read_bandwidth / 1e9,
        "seconds_to_first_token": row.seconds_to_first_token,
        "peak_resident_bytes": row.peak_resident_bytes,
        "joules_per_token": row.timings.joules_per_token,
    }


def energy_lines(rows: Sequence[SpeedRow | VersusRow]) -> list[str]:
    """A line on the energy of a token of each workload, if it was measured."""
    measured = [(row, row.timings.joules_per_token) for row in rows if isinstance(row, SpeedRow)]
    parts = [f"{row.workload.name} {joules:.3g}" for row, joules in measured if joules is not None]
    return [f"joules per token, of the whole processors and the GPU: {', '.join(parts)}"] if parts else []


def versus_record(row: VersusRow) -> dict[str, Any]:
    """One row as JSON values in base units; rates are tokens per second."""
    return {
        **_workload_record(row),
        "edgeinfer": _engine_record(row.ours),
        "llama.cpp": _engine_record(row.theirs),
        "best_decile_ratio": row.best_ratio,
        "median_ratio": row.median_ratio,
        "gigabytes_per_second": row.gigabytes_per_second,
        "bandwidth_share": row.bandwidth_share,
        "read_bandwidth_gigabytes_per_second": row.read_bandwidth / 1e9,
    }


def _workload_record(row: SpeedRow | VersusRow) -> dict[str, Any]:
    workload = row.workload
    return {
        "test": workload.name,
        "kind": workload.kind,
        "tokens": workload.tokens,
        "depth": workload.depth,
        "threads": row.threads,
    }


def _engine_record(timings: Timings) -> dict[str, Any]:
    return {
        "best_decile": timings.rate_at(BEST_DECILE),
        "median": timings.rate_at(MEDIAN),
        "seconds": list(timings.seconds),
        "tokens_a_piece": timings.tokens,
        "spread": timings.spread,
        "too_noisy": timings.is_noisy,
    }


def noise_lines(rows: Sequence[SpeedRow | VersusRow]) -> list[str]:
    """Warnings about rows that varied too much between their rounds."""
    lines = []
    for row in rows:
        timings = [row.timings] if isinstance(row, SpeedRow) else [row.ours, row.theirs]
        worst = max(timings, key=lambda one: one.spread)
        if worst.is_noisy:
            lines.append(
                f"{row.workload.name}, {row.threads} threads: too noisy: the middle half of the rounds "
                f"differs by {worst.spread:.0%}, wanted {MAX_SPREAD:.0%} at most; end other programs and "
                "measure again"
            )
    return lines


def report_record(model: BenchedModel, machine: Machine, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A whole run as JSON values."""
    return {
        "model": model.name,
        "path": str(model.path),
        "size_bytes": model.size_bytes,
        "parameters": model.parameters,
        "machine": dict(vars(machine)),
        "results": list(rows),
    }


def csv_table(model: BenchedModel, rows: Sequence[dict[str, Any]]) -> str:
    """Records as CSV: one line each, nested names joined by a dot, lists of seconds omitted."""
    flat = [{"model": model.name, **_flat(row)} for row in rows]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(flat[0]) if flat else ["model"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue().rstrip("\n")


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            cells |= _flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list):
            cells[f"{prefix}{name}"] = value
    return cells
