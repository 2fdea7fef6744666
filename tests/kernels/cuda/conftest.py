"""Triton's kernels on a GPU where there is one, otherwise interpreted on the CPU."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Read when a kernel is defined: it has to be set before the first of our modules is imported.
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")


@pytest.fixture(scope="session")
def device() -> str:
    """Where the tensors of these tests lie."""
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(scope="session", autouse=True)
def _mended_interpreter() -> Iterator[None]:
    """Triton's interpreter with newer numpy, and with sorts that don't go element by element."""
    if HAS_GPU:
        yield
        return
    from triton.language import standard
    from triton.runtime import interpreter

    patch, reduce_slowly = interpreter._patch_lang_tensor, interpreter.ReduceOps.generic_reduce

    def patch_tensor(tensor: Any, scope: Any) -> None:
        # Numbers are arrays of one element, which numpy 2.4 no longer turns into an int.
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def reduce(self: Any, inputs: Any) -> Any:
        # A sort swaps neighbours by exclusive or: hundreds of reductions, each with a call an element.
        if self.combine_fn != standard._xor_combine:
            return reduce_slowly(self, inputs)
        data = np.bitwise_xor.reduce(inputs[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return [self.to_tensor(data, inputs[0].dtype)]

    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(interpreter, "_patch_lang_tensor", patch_tensor)
        changes.setattr(interpreter.ReduceOps, "generic_reduce", reduce)
        yield
