"""Whether the program that left a file behind still runs."""

import os


def is_alive(process: int) -> bool:
    """Whether there is a process of that number; True where that can't be told."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    except OverflowError:  # no number of a process
        return False
    return True
