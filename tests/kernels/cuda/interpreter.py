"""Triton's interpreter with fixes: programs at once, sorts by numpy, no repeated work."""

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

from tests.kernels.cuda.interpreted.fast_operators import fast_operators
from tests.kernels.cuda.interpreted.memory import move_compiled
from tests.kernels.cuda.interpreted.program_arrays import add_program_axis, is_true, transposed
from tests.kernels.cuda.interpreted.program_reductions import reduce_by_program
from tests.kernels.cuda.interpreted.programs import one_value, run_together
from tests.kernels.cuda.interpreted_types import look_up_types


class _NothingToRestore:
    """The result of a nested call: the outermost one restores the language."""

    def restore(self) -> None:
        """Nothing."""


class _OncePatched:
    """Patches the whole language for the outermost call, with what it has found the first time; the original
    does it for each call, slowly.
    """

    def __init__(self, patch: Any) -> None:
        self._patch = patch
        self._patched = False
        self._attributes: list[tuple[Any, str, Any, Any]] = []
        """(object, name, its value in a kernel, its value outside)."""

    def __call__(self, function: Any) -> Any:
        if self._patched:
            return _NothingToRestore()
        self._patched = True
        if self._attributes:
            for owner, name, inside, _ in self._attributes:
                setattr(owner, name, inside)
        else:
            self._find_attributes()
        return self

    def _find_attributes(self) -> None:
        outside: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        for owner, name, value in self._patch(
            SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
        )._changes:
            outside.setdefault((id(owner), name), (owner, name, value))
        self._attributes = [(owner, name, getattr(owner, name), was) for owner, name, was in outside.values()]

    def restore(self) -> None:
        """After the outermost call."""
        self._patched = False
        for owner, name, _, outside in self._attributes:
            if outside is interpreter._MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, outside)


def _sorted(x: Any, k: Any = None, dim: Any = None, descending: Any = False) -> Any:
    """The result of Triton's bitonic sort, along the last dimension."""
    data = np.sort(x.handle.data, axis=-1)
    data = data[..., ::-1] if getattr(descending, "value", descending) else data
    best = data[..., : getattr(k, "value", k)].copy()
    block = tl.block_type(x.dtype, list(best.shape[1:]))
    return tl.core.tensor(interpreter.TensorHandle(best, x.dtype), block)


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
    operators: dict[str, Any] = {}

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        if not operators:  # The language has two names for its tensors.
            operators.update(fast_operators(tensor))
        for name, method in operators.items():
            scope.set_attr(tensor, name, method)
        scope.set_attr(tensor, "__index__", lambda self: int(one_value(self.handle.data)))
        scope.set_attr(tensor, "__bool__", is_true)
        scope.set_attr(tensor, "T", property(transposed))

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
        add_program_axis(changes, run_together(changes))
        reduce_by_program(changes)
        move_compiled(changes)
        yield
