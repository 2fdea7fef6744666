"""Long chats with edits, on a model whose state is recurrent."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

import edgeinfer
from edgeinfer.engine.kv_cache import shared_prefix
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer_kernels import recurrent_state
from tests.model_zoo import ZOO

CHUNK = 512
TURNS = 30


def edited(history: list[list[int]], source: random.Random) -> list[list[int]]:
    """The turns before the one whose message is edited: mostly a late one."""
    first = max(0, len(history) - 6) if source.random() < 0.7 else 0
    return history[: source.randrange(first, len(history))]


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [recurrent_state.MIN_CHECKPOINTS, 6, recurrent_state.MAX_CHECKPOINTS])
def test_edits_of_a_long_chat_prefill_at_most_one_more_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoints: int
) -> None:
    monkeypatch.setattr(recurrent_state, "MAX_CHECKPOINTS", checkpoints)
    path = replace(ZOO["qwen35"], context=8192).write(tmp_path / "model.gguf")
    source = random.Random(5)
    history: list[list[int]] = []
    edits = 0
    with edgeinfer.load(path, context=8192, device="cpu", draft=None, threads=2) as model:
        engine = model.engine
        assert isinstance(engine, NativeEngine)
        for turn in range(TURNS):
            if turn > 3 and source.random() < 0.4:
                history, edits = edited(history, source), edits + 1
            message = [source.randrange(engine.vocabulary_size) for _ in range(source.randrange(20, 300))]
            text = [token for each in history for token in each] + message
            kept = shared_prefix(engine.ids, text)
            before = engine.backend.rewind(kept)
            assert kept - before <= CHUNK
            engine.cache.rewind(before)
            engine.append(text[before:])
            response = [source.randrange(engine.vocabulary_size) for _ in range(source.randrange(20, 150))]
            for token in response:
                engine.append([token])
            history.append(message + response)
    assert edits > 5
