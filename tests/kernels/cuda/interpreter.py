"""Triton's interpreter with fixes: numbers for numpy 2.4, sorts by numpy, no repeated work."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language import standard
from triton.runtime import interpreter

from tests.kernels.cuda.interpreted_types import look_up_types


class _NothingToRestore:
    """The result of a nested call: the outermost one restores the language."""

    def restore(self) -> None:
        """Nothing."""


class _OncePatched:
    """Patches the whole language once, for the outermost call; the original does it for each call, slowly."""

    def __init__(self, patch: Any) -> None:
        self._patch = patch
        self._patched = False

    def __call__(self, function: Any) -> Any:
        if self._patched:
            return _NothingToRestore()
        scope = self._patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        restore = scope.restore
        self._patched = True

        def restore_and_clear() -> None:
            self._patched = False
            restore()

        scope.restore = restore_and_clear
        return scope


def _sorted(x: Any, k: Any = None, dim: Any = None, descending: Any = False) -> Any:
    """The result of Triton's bitonic sort, along the last dimension."""
    data = np.sort(x.handle.data, axis=-1)
    data = data[..., ::-1] if getattr(descending, "value", descending) else data
    best = data[..., : getattr(k, "value", k)].copy()
    return tl.core.tensor(interpreter.TensorHandle(best, x.dtype), tl.block_type(x.dtype, list(best.shape)))


def _tuple_without_type(self: Any, args: Sequence[Any], type: Any = None) -> None:
    """The text of a tuple's type is built on request: shapes are tuples, and theirs is never read."""
    self.values = list(args)
    if type is not None:
        self.type = type if isinstance(type, tl.core.tuple_type) else tl.core.tuple_type(type)


def _type_of_tuple(self: Any) -> Any:
    return tl.core._type_for_tuple_values(self.values)


@contextmanager
def fixed_interpreter() -> Iterator[None]:
    """In this context, kernels run in the fixed interpreter."""
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        # Numbers are arrays of one element, which numpy 2.4 no longer converts to an int.
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    builder = interpreter.interpreter_builder
    # Otherwise every integer is computed three times, to check for overflow.
    unwatched = replace(builder.options, sanitize_overflow=False)
    late_type = cached_property(_type_of_tuple)
    late_type.__set_name__(tl.core.tuple, "type")
    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(interpreter, "_patch_lang_tensor", patch_tensor)
        changes.setattr(interpreter, "_patch_lang", _OncePatched(interpreter._patch_lang))
        changes.setattr(standard, "sort_impl", _sorted)
        changes.setattr(builder, "options", unwatched)
        changes.setattr(tl.core.tuple, "__init__", _tuple_without_type)
        changes.setattr(tl.core.tuple, "type", late_type, raising=False)
        look_up_types(changes)
        yield
