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


@pytest.fixture
def float32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step uses tensor cores: with products in float16, steps of different numbers of tokens would find
    other tokens with the flat logits of random weights.
    """
    from edgeinfer_kernels.cuda import backend
    from edgeinfer_kernels.cuda.tuning.step_shapes import TensorShapes, Tuning, usual_tuning

    def without_tensor_cores(*given: int) -> Tuning:
        none = TensorShapes()
        return usual_tuning(*given).replace(tensor_eight=none, tensor_sixteen=none)

    monkeypatch.setattr(backend, "usual_tuning", without_tensor_cores)
