"""Triton's kernels on a GPU where there is one, otherwise interpreted on the CPU."""

import os
from collections.abc import Iterator
from typing import Any

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
def _loops_with_bounds_from_tensors() -> Iterator[None]:
    """The interpreter keeps numbers as arrays of one element, which numpy 2.4 no longer turns into an int."""
    if HAS_GPU:
        yield
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(interpreter, "_patch_lang_tensor", patched)
        yield
