"""Compiled kernels, built once for the whole suite."""

import pytest

BY_KERNELS = {"kernels", "kernels_for"}


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_built_together(request: pytest.FixtureRequest) -> None:
    """What tests of kernels want of every instruction set is there before any test loads a model.

    Most of a compiler's work is the same for all sets: who built for one first would have it done twice.
    """
    if any(BY_KERNELS.intersection(getattr(item, "fixturenames", ())) for item in request.session.items):
        from tests.kernels.conftest import objects

        objects()
