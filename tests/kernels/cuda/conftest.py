"""Triton's kernels on a GPU where there is one, otherwise interpreted on the CPU."""

import gc
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
HAS_GPU = torch.cuda.is_available()
OBJECTS_BEFORE_COLLECTION = 70_000
"""An interpreted kernel makes millions of short-lived objects, hardly any of them in a circle."""
pytest.importorskip("triton")


@pytest.fixture(scope="session")
def device() -> str:
    """Where the tensors of these tests lie."""
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(scope="session", autouse=True)
def _fixed_interpreter() -> Iterator[None]:
    """Triton's interpreter, mended for this numpy and sped up."""
    if HAS_GPU:
        yield
        return
    from tests.kernels.cuda.interpreter import fixed_interpreter

    often = gc.get_threshold()
    gc.set_threshold(OBJECTS_BEFORE_COLLECTION)
    with fixed_interpreter():
        yield
    gc.set_threshold(*often)
