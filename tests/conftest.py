"""What the whole suite shares: processors, and compiled kernels."""

import gc
import os
from collections.abc import Callable
from importlib.util import find_spec

import pytest

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    # As many workers run as there are processors: numpy's and torch's threads would spin for one, a third of
    # all processor time. Read when they are imported first.
    os.environ.setdefault(name, "1")
if find_spec("torch") is not None:
    import torch

    if not torch.cuda.is_available():
        # Triton reads it when a kernel is defined: before any test module imports one.
        os.environ["TRITON_INTERPRET"] = "1"
BY_KERNELS = {"kernels", "kernels_for"}
OBJECTS_BEFORE_COLLECTION = 10_000
"""Python's own 700 have a chat's tests look through everything once a second, half a second long."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much of the fuzz and fault tests to run."""
    parser.addoption(
        "--attack-share",
        type=float,
        default=0.1,
        help="which part of the cases the slow fuzz and fault tests run (0.1; all: 1)",
    )


@pytest.fixture(scope="session")
def scaled(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """A number of cases -> how many of them to run."""
    share: float = request.config.getoption("--attack-share")
    return lambda cases: max(1, round(cases * share))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: nobody need look for cycles in them."""
    gc.freeze()
    gc.set_threshold(OBJECTS_BEFORE_COLLECTION)


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_built_together(request: pytest.FixtureRequest) -> None:
    """What tests of kernels want of every instruction set is there before any test loads a model.

    Most of a compiler's work is the same for all sets: who built for one first would have it done twice.
    """
    if any(BY_KERNELS.intersection(getattr(item, "fixturenames", ())) for item in request.session.items):
        from tests.kernels.conftest import objects

        objects()


@pytest.fixture
def anyio_backend() -> str:
    """Textual and the server run on asyncio."""
    return "asyncio"
