"""Completions with drafts are compared with those of models whose prompts are cached to other lengths."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _same_rounding(without_amx: None) -> None:
    """Prompts are rounded as steps are."""
