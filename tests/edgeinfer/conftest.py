"""Random models, written once; those that many tests use are loaded once."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer_kernels.cpu import block_builder
from tests.model_zoo import ZOO

ZooFile = Callable[[str], Path]


@pytest.fixture(scope="session")
def zoo_file(tmp_path_factory: pytest.TempPathFactory) -> ZooFile:
    """Name in the zoo -> its file."""
    folder = tmp_path_factory.mktemp("zoo")

    def written(name: str) -> Path:
        path = folder / f"{name}.gguf"
        return path if path.exists() else ZOO[name].write(path)

    return written


@pytest.fixture(scope="module")
def without_amx() -> Iterator[None]:
    """Models that a module loads process prompts with the kernels of single tokens. AMX rounds differently: a
    completion whose prompt is partly in the cache may differ from one that reads the whole prompt.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(block_builder, "TILE_TOKENS", block_builder.NO_TILES)
        yield


@pytest.fixture(scope="session")
def loaded(zoo_file: ZooFile) -> Iterator[Model]:
    """A random model of 256 tokens of context; its users leave it usable."""
    with edgeinfer.load(zoo_file("llama"), threads=1) as model:
        yield model


@pytest.fixture(scope="session")
def tiny() -> Iterator[Model]:
    """The built-in model."""
    with edgeinfer.load("tiny", threads=1) as model:
        yield model
