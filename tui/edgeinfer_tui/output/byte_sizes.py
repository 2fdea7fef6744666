"""Byte counts in readable units."""

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
