"""Tables as lines of text: aligned columns that are easy to process with grep and awk."""

from collections.abc import Collection, Sequence
from textwrap import wrap

WIDTH = 80
"""Columns of a terminal, which a row of a report doesn't exceed."""
GAP = "  "


def aligned(
    rows: Sequence[Sequence[str]], right: Collection[int] = (), width: int | None = None
) -> list[str]:
    """Rows as lines with aligned columns; those numbered in `right` are right-aligned.

    With a `width`, a first cell that is too long for it continues in the next line, indented.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    if width is not None:
        others = sum(widths[1:]) + len(GAP) * (len(widths) - 1)
        widths[0] = min(widths[0], max(width - others, len(rows[0][0]), 8))
    lines = []
    for row in rows:
        first, *rest = wrap(row[0], widths[0], subsequent_indent=GAP) if len(row[0]) > widths[0] else [row[0]]
        cells = [
            cell.rjust(size) if column in right else cell.ljust(size)
            for column, (cell, size) in enumerate(zip((first, *row[1:]), widths, strict=True))
        ]
        lines += [GAP.join(cells).rstrip(), *rest]
    return lines
