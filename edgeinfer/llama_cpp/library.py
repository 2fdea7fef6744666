"""Imports llama-cpp-python on demand."""

import ctypes
from functools import cache
from typing import Any, NamedTuple

from edgeinfer.errors import EdgeInferError
from edgeinfer_kernels.caches.cache_types import (
    SCALED_TYPES,
    CacheType,
    ElementType,
    element_types,
    has_recent,
)

_ERROR, _CONTINUED = 4, 5
"""Values of ggml's `enum ggml_log_level`."""
CACHE_TYPES: dict[ElementType, int] = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
"""Values of ggml's `enum ggml_type`."""


class LlamaCppCacheType(NamedTuple):
    """The types of keys and values in llama.cpp, and whether they are supported only with flash attention."""

    keys: int
    values: int
    needs_flash_attention: bool


def llama_cpp_cache_type(kind: CacheType) -> LlamaCppCacheType:
    """Raises `EdgeInferError` for a type that llama.cpp doesn't have."""
    types = element_types(kind)
    if has_recent(kind):
        raise EdgeInferError(f"kv: llama.cpp has no {kind}; take {'/'.join(types)}")
    for each in types:
        if each not in CACHE_TYPES:
            raise EdgeInferError(f"kv: llama.cpp has no {each}; take {', '.join(CACHE_TYPES)}")
    return LlamaCppCacheType(
        CACHE_TYPES[types[0]], CACHE_TYPES[types[1]], any(each in SCALED_TYPES for each in types)
    )


def llama_cpp_library(requested_by: str) -> Any:
    """The module `llama_cpp`; `requested_by` is the option that needs it.

    Raises `EdgeInferError` if it isn't installed.
    """
    try:
        import llama_cpp
    except ImportError as error:
        raise EdgeInferError(
            f"{requested_by} needs llama-cpp-python: pip install 'edgeinfer[llama-cpp]'"
        ) from error
    return llama_cpp


class LogCatcher:
    """Redirects llama.cpp's log from the terminal and keeps its errors, which explain failed calls."""

    def __init__(self, library: Any) -> None:
        self._errors: list[str] = []
        self._level = 0
        self._library = library
        # Keep a reference, or ctypes frees the callback.
        self._callback = library.llama_log_callback(self._take)
        self.clear()

    def _take(self, level: int, text: bytes, user_data: object) -> None:
        if level != _CONTINUED:
            self._level = level
        if self._level == _ERROR:
            self._errors.append(text.decode("utf-8", "replace"))

    def clear(self) -> None:
        """Clear the errors and install the callback again, in case other code has replaced it."""
        self._errors.clear()
        self._library.llama_log_set(self._callback, ctypes.c_void_p(0))

    @property
    def first_error(self) -> str | None:
        """The first error since `clear`, on one line; llama.cpp logs the cause first."""
        lines = "".join(self._errors).strip().splitlines()
        return " ".join(lines[0].split()) if lines else None


@cache
def log_catcher() -> LogCatcher:
    """The single log catcher of this process, because llama.cpp has one log."""
    return LogCatcher(llama_cpp_library("llama.cpp"))
