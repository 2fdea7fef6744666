"""Models with draft heads on the CPU: their settings and drafters, and checks that their tests share."""

from collections.abc import Sequence
from typing import Any

import pytest

from edgeinfer import Model
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.drafter import Draft, DraftRequest

GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0}
CPU: dict[str, Any] = {"device": "cpu", "threads": 1, "context": 256}


def drafter_of(model: Model) -> Any:
    assert model.speculator is not None
    return model.speculator.drafter


def sampled_drafts(model: Model, ids: Sequence[int]) -> list[Draft]:
    """Twenty sampled drafts after a text, which differ, and whose tokens are among the candidates of their
    distributions.
    """
    model.engine.rewind(0)
    model.engine.append(ids[:-1])
    request = DraftRequest(3, SamplingParams(temperature=1.5))
    drafts: list[Draft] = [drafter_of(model).propose(ids, request) for _ in range(20)]
    assert len({draft.ids for draft in drafts}) > 1
    for draft in drafts:
        assert draft.distributions is not None
        for token, (candidates, probs) in zip(draft.ids, draft.distributions, strict=True):
            assert token in candidates
            assert probs.sum() == pytest.approx(1.0)
    return drafts
