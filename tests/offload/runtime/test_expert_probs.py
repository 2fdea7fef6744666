"""Expert probabilities of a profile, confirmed on other text."""

import numpy as np
import pytest

from edgeinfer_offload.runtime.activity_profile import ActivityProfile
from edgeinfer_offload.runtime.concentration import expert_probs
from tests.offload.model_shapes import dense_model, moe_model


def profile(counts: dict[int, "np.ndarray[tuple[int, ...], np.dtype[np.uint32]]"]) -> ActivityProfile:
    return ActivityProfile("hash", (1000, 1000), "", {f"experts.{i}": c for i, c in counts.items()})


def skewed(hot: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint32]]":
    """Eight experts a token of 128, expert `hot` always among them."""
    counts = np.full((2, 128), 7000 // 127, np.uint32)
    counts[:, hot] = 1000
    return counts


def test_expert_probs_sum_to_experts_per_token() -> None:
    sizes = moe_model()
    hottest = np.full((2, 128), 10, np.uint32)
    hottest[:, 96:] = 900
    result = expert_probs(profile(dict.fromkeys(range(48), hottest)), sizes)
    assert result is not None
    assert len(result) == 48
    assert sum(result[0]) == pytest.approx(8)
    assert result[0][100] == pytest.approx(8 * 900 / (32 * 900 + 96 * 10))


def test_unconfirmed_expert_probs_count_as_uniform() -> None:
    counts = np.full((2, 128), 10, np.uint32)
    counts[0, :32], counts[1, 32:64] = 900, 900
    result = expert_probs(profile(dict.fromkeys(range(48), counts)), moe_model())
    assert result is not None
    assert result[0] == (8 / 128,) * 128


def test_a_profile_of_another_model_is_ignored() -> None:
    assert expert_probs(profile({}), moe_model()) is None
    assert expert_probs(profile({0: skewed(3)}), moe_model()) is None
    small = np.ones((2, 64), np.uint32)
    assert expert_probs(profile(dict.fromkeys(range(48), small)), moe_model()) is None
    assert expert_probs(profile({0: skewed(3)}), dense_model()) is None
