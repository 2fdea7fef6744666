"""C functions with which threads of compiled code yield, sleep, and wait until a word of memory changes."""

import ctypes
import sys
from dataclasses import dataclass, field

from edgeinfer_kernels.cpu.runtime.abi import WAIT_KINDS
from edgeinfer_kernels.system.processor import architecture

FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}
SLEEP_MICROSECONDS = 500
SLEEP_MILLISECONDS = 1
"""The shortest sleep of Windows, which may take 15 ms."""


@dataclass(frozen=True)
class WaitFunctions:
    """Addresses of C functions; see `ThreadPoolArgs`, whose fields have the same names."""

    yield_function: int
    sleep_function: int
    sleep_argument: int
    wait_kind: int = WAIT_KINDS["sleep"]
    wait_function: int = 0
    wake_function: int = 0
    futex: int = 0
    libraries: tuple[object, ...] = field(default=(), repr=False)
    """Kept alive for the addresses."""


def wait_functions() -> WaitFunctions:
    """Those of this system: a futex on Linux, WaitOnAddress on Windows, os_sync_wait_on_address on macOS
    (14.4 and later), and otherwise short sleeps.
    """
    if sys.platform == "win32":
        return _of_windows()
    library = ctypes.CDLL(None)
    usual = (address_of(library.sched_yield), address_of(library.usleep), SLEEP_MICROSECONDS)
    if sys.platform == "linux" and architecture() in FUTEX_NUMBERS:
        call = address_of(library.syscall)
        number = FUTEX_NUMBERS[architecture()]
        return WaitFunctions(*usual, WAIT_KINDS["futex"], call, call, number, (library,))
    if sys.platform == "darwin" and hasattr(library, "os_sync_wait_on_address"):
        wait = address_of(library.os_sync_wait_on_address)
        wake = address_of(library.os_sync_wake_by_address_all)
        return WaitFunctions(*usual, WAIT_KINDS["macos"], wait, wake, 0, (library,))
    return WaitFunctions(*usual, libraries=(library,))


def _of_windows() -> WaitFunctions:
    if sys.platform != "win32":
        raise OSError(f"system {sys.platform}, wanted win32")
    kernel32 = ctypes.windll.kernel32
    usual = (address_of(kernel32.SwitchToThread), address_of(kernel32.Sleep), SLEEP_MILLISECONDS)
    synch = ctypes.WinDLL("api-ms-win-core-synch-l1-2-0.dll")  # Windows 8 and later
    wait, wake = address_of(synch.WaitOnAddress), address_of(synch.WakeByAddressAll)
    return WaitFunctions(*usual, WAIT_KINDS["windows"], wait, wake, 0, (kernel32, synch))


def address_of(function: object) -> int:
    """The address of a C function."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
