"""Prompts are processed with the kernels of single tokens."""

from collections.abc import Iterator

import pytest

from edgeinfer_kernels.cpu import block_builder


@pytest.fixture(scope="module", autouse=True)
def _prompts_without_tiles() -> Iterator[None]:
    """AMX rounds differently: a completion whose prompt is partly in the cache could differ from one whose
    prompt isn't.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(block_builder, "TILE_TOKENS", block_builder.NO_TILES)
        yield
