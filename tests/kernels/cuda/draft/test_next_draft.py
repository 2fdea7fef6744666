"""Drafts that are made ahead, while the host doesn't know yet how the text continues."""

from pathlib import Path
from typing import Any

import pytest
import torch

import edgeinfer
from edgeinfer.speculation.heads.device_head import DeviceHead
from edgeinfer_kernels.cuda.draft.draft_steps import DraftSteps
from edgeinfer_kernels.cuda.draft.verification.next_draft import NextTokens
from edgeinfer_kernels.cuda.draft.verification.next_draft_kernels import next_tokens_kernel
from edgeinfer_kernels.draft_loop import DraftedTokens
from edgeinfer_kernels.sizes.cuda_buffers import (
    CACHED_AT,
    MAX_TOKENS,
    POSITIONS_AT,
    SEQUENCES_AT,
    STATE_WORDS,
)
from harness.drafts import agreeing_head
from tests.edgeinfer.speculation.test_drafting import always_draft
from tests.kernels.cuda.conftest import HAS_GPU
from tests.kernels.cuda.draft.test_head_loading import GPU, IDS, WITH_HEAD
from tests.kernels.cuda.draft.test_head_loading import unmeasured as unmeasured
from tests.kernels.cuda.offload.conftest import small_gpu as small_gpu

DEVICE = "cuda" if HAS_GPU else "cpu"
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0}
SAMPLED: dict[str, Any] = {**GREEDY, "temperature": 0.7, "top_k": 4, "seed": 3}
PENALIZED: dict[str, Any] = {**SAMPLED, "max_tokens": 8, "repeat_penalty": 1.3}


@pytest.mark.parametrize("right", [0, 1, 2, 3])
@pytest.mark.parametrize("width", [4, 6])
def test_the_first_step_ends_with_the_tokens_that_the_target_continues_with(right: int, width: int) -> None:
    draft, before, start = [31, 32, 33], [11, 12, 13, 14, 15][: width - 1], 40
    best = [*draft[:right], 50, 51, 52, 53][:4]
    words, verified = torch.full((2, STATE_WORDS), 7, dtype=torch.int32, device=DEVICE)
    words[: width - 1] = torch.tensor(before)
    words[SEQUENCES_AT] = start
    verified[1:4] = torch.tensor(draft)
    best_ids = torch.zeros((MAX_TOKENS, 2), dtype=torch.int32, device=DEVICE)
    best_ids[:4, 0] = torch.tensor(best)
    next_tokens_kernel[(1,)](words, verified, best_ids, 3, width - 1)
    expected = [*before, *best[: right + 1]][-width:]
    assert words[:width].tolist() == expected
    assert words[POSITIONS_AT : POSITIONS_AT + width].tolist() == list(
        range(start + right, start + right + width)
    )
    assert words[[CACHED_AT, SEQUENCES_AT]].tolist() == [start + right] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("settings", [SAMPLED, GREEDY])
def test_drafts_made_ahead_are_those_made_after_the_host_has_the_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    path = tmp_path / "agrees.gguf"
    monkeypatch.setattr(agreeing_head, "OUTPUT_FORMAT", "Q8_0")
    agreeing_head.write_agreeing(WITH_HEAD.write(tmp_path / "model.gguf"), path, 0.7, 1.0)
    drafts, ahead = list[list[int]](), list[int]()
    draft, take = DraftSteps.draft, NextTokens.take

    def drafted(self: DraftSteps, *arguments: Any) -> DraftedTokens:
        result = draft(self, *arguments)
        drafts.append(result.ids)
        return result

    def taken(self: NextTokens, *arguments: Any, **named: Any) -> int:
        ahead.append(take(self, *arguments, **named))
        return ahead[-1]

    monkeypatch.setattr(DraftSteps, "draft", drafted)
    monkeypatch.setattr(NextTokens, "take", taken)
    with edgeinfer.load(path, draft="mtp", **GPU) as model:
        assert model.speculator is not None
        assert isinstance(model.speculator.drafter, DeviceHead)
        speculator, model.speculator = model.speculator, None
        expected = model.generate(IDS, **settings).ids
        others = [(other, model.generate(IDS, **other).ids) for other in (PENALIZED, GREEDY, SAMPLED)]
        model.speculator = speculator
        always_draft(model, 3)
        found = []
        for is_ahead in (False, True):
            drafts.clear()
            ahead.clear()
            with monkeypatch.context() as change:
                if not is_ahead:
                    change.setattr(NextTokens, "follows", lambda self, ids: False)
                model.engine.rewind(0)
                completion = model.generate(IDS, **settings)
            assert completion.ids == expected
            assert (sum(ahead) > 0) == is_ahead
            found.append(list(drafts))
        assert found[0] == found[1]
        assert ahead.count(3) >= len(ahead) - 3
        accepted = completion.speed.accepted_share
        assert accepted is not None
        assert 0 < accepted < 1
        # The first drafts after a completion that finds its tokens in another way are not of that way.
        for other, wanted in others:
            ahead.clear()
            assert model.generate(IDS, **other).ids == wanted
            assert any(ahead) == (other is not PENALIZED)
