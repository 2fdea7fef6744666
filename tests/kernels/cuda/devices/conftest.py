"""Interpreted ranks are forks, except in tests of the program of a rank."""

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from edgeinfer_offload.runtime import rank_processes
from tests.kernels.cuda.conftest import HAS_GPU
from tests.kernels.cuda.devices.rank_forks import RankForks


@pytest.fixture(scope="session")
def rank_forks() -> Iterator[RankForks]:
    forks = RankForks()
    yield forks
    forks.close()


@pytest.fixture
def started_ranks() -> None:
    """The ranks of this test are programs, as those of a user."""


@pytest.fixture(autouse=True)
def _ranks_are_forks(
    request: pytest.FixtureRequest, rank_forks: RankForks, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not HAS_GPU and "started_ranks" not in request.fixturenames:
        replaced = SimpleNamespace(**vars(subprocess) | {"Popen": rank_forks.popen})
        monkeypatch.setattr(rank_processes, "subprocess", replaced)
