"""The model of each test module's `path`, without a drafter."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import edgeinfer
from edgeinfer import Model
from tests.edgeinfer.speculation.heads.drafting_models import CPU


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[Model]:
    with edgeinfer.load(path, draft=None, **CPU) as model:
        yield model
