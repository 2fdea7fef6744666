"""The report of `quantize`, gathered first and printed later, so that text and JSON agree."""

from typing import TYPE_CHECKING, Any

from edgeinfer_tui.output.columns import one_line, print_columns, shown_bytes
from edgeinfer_tui.output.progress_line import shown_time

if TYPE_CHECKING:
    from edgeinfer.quantizing import Quantization


def quantize_report(done: "Quantization") -> dict[str, Any]:
    """Everything that `quantize` prints, as JSON values."""
    return {
        "source": str(done.source),
        "target": None if done.target is None else str(done.target),
        "type": done.plan.mix.name,
        "file_type": done.plan.mix.file_type,
        "source_bytes": done.source_bytes,
        "target_bytes": done.plan.nbytes,
        "bits_per_weight": done.plan.bits_per_weight,
        "seconds": done.seconds,
        "warnings": list(done.warnings),
        "tensors": [
            {
                "name": tensor.info.name,
                "shape": list(tensor.info.shape),
                "from": tensor.info.format.name,
                "to": tensor.target.name,
                "bytes": tensor.nbytes,
            }
            for tensor in done.plan.tensors
        ],
    }


def print_table(report: dict[str, Any]) -> None:
    """Print a row for each tensor, and the totals."""
    rows = [
        [
            one_line(tensor["name"]),
            " x ".join(map(str, tensor["shape"])),
            tensor["from"],
            tensor["to"] if tensor["to"] != tensor["from"] else "-",
            f"{tensor['bytes']:,}",
        ]
        for tensor in report["tensors"]
    ]
    print_columns(["TENSOR", "ROWS x COLUMNS", "FROM", "TO", "BYTES"], rows, right={4})
    print(f"\n{report['type']}: {_sizes(report)}")


def summary(report: dict[str, Any]) -> str:
    """The written file, on one line."""
    seconds = shown_time(report["seconds"], exact=True)
    return f"{report['target']}: {report['type']}, {_sizes(report)}, in {seconds}"


def _sizes(report: dict[str, Any]) -> str:
    before, after = shown_bytes(report["source_bytes"]), shown_bytes(report["target_bytes"])
    return f"{before} -> {after}, {report['bits_per_weight']:.2f} bits per weight"
