"""Windows: calls of kernel32 about the processor. They return nothing on other systems."""

import ctypes
import struct
import sys
from dataclasses import dataclass

RELATION_CORE, RELATION_CACHE, RELATION_ALL = 0, 2, 0xFFFF
INSTRUCTION_CACHE = 1
HEADER, CORE, CACHE = struct.Struct("<II"), struct.Struct("<BB20xH"), struct.Struct("<BBHII18xH")
MASK = struct.Struct("<QH6x")


@dataclass(frozen=True)
class ProcessorInformation:
    """What GetLogicalProcessorInformationEx reports."""

    cores: tuple[tuple[int, int], ...] = ()
    """(efficiency class, logical CPUs) of each core; a larger class is faster."""
    caches: tuple[tuple[int, int], ...] = ()
    """(level, bytes) of each cache of data."""


def has_processor_feature(number: int) -> bool:
    """IsProcessorFeaturePresent."""
    if sys.platform != "win32":
        return False
    return bool(ctypes.windll.kernel32.IsProcessorFeaturePresent(number))


def affinity_of_process() -> int:
    """The CPUs of this process as bits; 0: unknown, or another system."""
    if sys.platform != "win32":
        return 0
    kernel32 = ctypes.windll.kernel32
    kernel32.GetCurrentProcess.restype = ctypes.c_void_p
    process, mask, of_system = (
        ctypes.c_void_p(kernel32.GetCurrentProcess()),
        ctypes.c_size_t(),
        ctypes.c_size_t(),
    )
    done = kernel32.GetProcessAffinityMask(process, ctypes.byref(mask), ctypes.byref(of_system))
    return mask.value if done else 0


def processor_information() -> ProcessorInformation:
    """The cores and caches of this machine; empty: unknown, or another system."""
    if sys.platform != "win32":
        return ProcessorInformation()
    size = ctypes.c_uint32(0)
    ask = ctypes.windll.kernel32.GetLogicalProcessorInformationEx
    ask(RELATION_ALL, None, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(max(1, size.value))
    if not ask(RELATION_ALL, buffer, ctypes.byref(size)):
        return ProcessorInformation()
    return read_processor_information(buffer.raw[: size.value])


def read_processor_information(data: bytes) -> ProcessorInformation:
    """Read an array of SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX."""
    cores, caches, at = [], [], 0
    while at + HEADER.size <= len(data):
        relation, size = HEADER.unpack_from(data, at)
        if size < HEADER.size or at + size > len(data):
            break
        body = at + HEADER.size
        if relation == RELATION_CORE:
            _, efficiency, groups = CORE.unpack_from(data, body)
            masks = [MASK.unpack_from(data, body + CORE.size + MASK.size * i)[0] for i in range(groups)]
            cores.append((efficiency, sum(mask.bit_count() for mask in masks)))
        elif relation == RELATION_CACHE:
            level, _, _, nbytes, kind, _ = CACHE.unpack_from(data, body)
            if kind != INSTRUCTION_CACHE:
                caches.append((level, nbytes))
        at += size
    return ProcessorInformation(tuple(cores), tuple(caches))
