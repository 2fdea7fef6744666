"""Plain text for reports: columns that are easy to process with grep and awk, byte counts, short lines."""

from collections.abc import Collection, Sequence

from edgeinfer_offload.report.table import aligned

UNITS = ("KiB", "MiB", "GiB", "TiB")


def shown_bytes(count: float) -> str:
    """`count` bytes in the unit that gives one to three digits before the point: 20678048 -> "19.7 MiB"."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in UNITS:
        count /= 1024
        if count < 1000 or unit == UNITS[-1]:
            break
    return f"{count:.1f} {unit}"


def print_columns(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[int] = (),
    width: int | None = None,
) -> None:
    """Print rows under their headers; the columns numbered in `right` are right-aligned. Lines longer than
    `width` are truncated.
    """
    table = [[cell.replace("\n", " ") for cell in row] for row in (head, *rows)]
    for line in aligned(table, right):
        print(one_line(line, width) if width else line)


def print_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Print names and values, with the values aligned in one column."""
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        print(f"{name:<{width}}  {value}".rstrip())


def one_line(text: object, width: int = 100) -> str:
    """A value from a file as one line: control characters escaped, long values truncated."""
    shown = "".join(mark if mark.isprintable() else ascii(mark)[1:-1] for mark in str(text)[: width + 1])
    return shown if len(shown) <= width else shown[: width - 3] + "..."
