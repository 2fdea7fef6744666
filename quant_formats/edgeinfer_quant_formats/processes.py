"""Checks whether the process that left a temporary file is still running."""

import os


def is_alive(process: int) -> bool:
    """Whether a process with this number exists; True if that is unknown."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # owned by another user
        return True
    except OverflowError:  # not a process number
        return False
    return True
