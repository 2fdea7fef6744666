"""Models with learned positions: the context has a limit, and cached tokens stay where they are."""

from pathlib import Path

import pytest

import edgeinfer
from edgeinfer.errors import SettingError
from tests.model_zoo import ZOO

NO_END = {2: -100.0}
"""A bias that keeps the end of text from being sampled."""


@pytest.mark.parametrize("name", ["gpt2", "starcoder", "mpt-positions"])
def test_a_longer_context_and_context_shift_are_refused(tmp_path: Path, name: str) -> None:
    path = ZOO[name].write(tmp_path / "model.gguf")
    with pytest.raises(SettingError, match="saw 257, but model has learned positions for 256 tokens only"):
        edgeinfer.load(path, device="cpu", context=257)
    with edgeinfer.load(path, device="cpu", draft=None, context=96) as model:
        with pytest.raises(SettingError, match="evicted from a text with learned positions; take 'stop'"):
            model.generate("the", max_tokens=4, context_overflow="shift")
        assert len(model.generate("the", max_tokens=4, temperature=0.0, logit_bias=NO_END).ids) == 4


def test_models_with_alibi_shift_their_context(tmp_path: Path) -> None:
    path = ZOO["bloom"].write(tmp_path / "model.gguf")
    with edgeinfer.load(path, device="cpu", draft=None, context=96) as model:
        completion = model.generate(
            list(range(4, 84)), max_tokens=40, temperature=0.0, context_overflow="shift", logit_bias=NO_END
        )
    assert (len(completion.ids), completion.context_shifts > 0) == (40, True)
