"""Triton's kernels on a GPU where there is one, otherwise interpreted on the CPU."""

import gc
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
HAS_GPU = torch.cuda.is_available()
OBJECTS_BEFORE_COLLECTION = 70_000
"""An interpreted kernel creates millions of short-lived objects, few of them in reference cycles."""
pytest.importorskip("triton")


@pytest.fixture(scope="session")
def device() -> str:
    """The device of the tensors of these tests."""
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(scope="session", autouse=True)
def _fixed_interpreter() -> Iterator[None]:
    """Triton's interpreter, fixed for this numpy and made faster."""
    if HAS_GPU:
        yield
        return
    from tests.kernels.cuda.interpreter import fixed_interpreter

    often = gc.get_threshold()
    gc.set_threshold(OBJECTS_BEFORE_COLLECTION)
    with fixed_interpreter():
        yield
    gc.set_threshold(*often)
