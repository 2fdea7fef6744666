"""Processes: whether one is alive, and children that a Ctrl-C does not reach."""

import ctypes
import os
import sys
from typing import Any

CREATE_NEW_PROCESS_GROUP = 0x200
PROCESS_QUERY_LIMITED_INFORMATION = 0x1000
STILL_ACTIVE = 259


def apart_from_terminal() -> dict[str, Any]:
    """Arguments of `subprocess.Popen` for a child that a Ctrl-C in the terminal does not reach."""
    if sys.platform == "win32":
        return {"creationflags": CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}


def is_alive(process: int) -> bool:
    """Whether a process with this number exists; True if that is unknown."""
    if sys.platform == "win32":
        return _is_alive_on_windows(process)
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # owned by another user
        return True
    except OverflowError:  # not a process number
        return False
    return True


def _is_alive_on_windows(process: int) -> bool:
    if sys.platform != "win32" or not 0 <= process < 1 << 32:
        return False
    kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel32.OpenProcess.restype = ctypes.c_void_p
    opened = kernel32.OpenProcess(PROCESS_QUERY_LIMITED_INFORMATION, False, process)
    if not opened:
        return ctypes.get_last_error() == 5  # access denied: it exists
    handle, code = ctypes.c_void_p(opened), ctypes.c_uint32()
    known = kernel32.GetExitCodeProcess(handle, ctypes.byref(code))
    kernel32.CloseHandle(handle)
    return not known or code.value == STILL_ACTIVE
