"""Which experts get slots: hot ones and those that became hot, none by random fluctuation."""

import numpy as np
import numpy.typing as npt

from edgeinfer_offload.runtime.expert_cache_policy import ExpertCachePolicy, ExpertUsage, simulate

EXPERTS, EXPERTS_PER_TOKEN = 64, 4


def trace(hot: list[int], tokens: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """(1, tokens, USED): each token selects three of four from `hot`, and any other."""
    random = np.random.default_rng(seed)
    chosen = [
        [*random.choice(hot, EXPERTS_PER_TOKEN - 1, replace=False), random.integers(EXPERTS)]
        for _ in range(tokens)
    ]
    return np.array([chosen], np.int64)


def test_hot_experts_get_the_slots_and_stay() -> None:
    hot = [3, 17, 40, 41, 60, 63]
    slots = ExpertCachePolicy(EXPERTS, EXPERTS_PER_TOKEN, [range(6)])
    cold_start = simulate(trace(hot, 600), slots)
    assert set(np.flatnonzero(slots.slots[0] >= 0)) == set(hot)
    assert sorted(slots.slots[0][hot]) == list(range(6))
    settled = simulate(trace(hot, 600, seed=1), slots)
    assert settled.copies <= 1
    never = simulate(
        trace(hot, 600), ExpertCachePolicy(EXPERTS, EXPERTS_PER_TOKEN, [range(6)]), swapping=False
    )
    assert settled.hit_rate > cold_start.hit_rate > 0.6 > 0.3 > never.hit_rate


def test_slots_follow_when_other_experts_become_hot() -> None:
    first, second = [1, 2, 3, 4, 5, 6], [50, 51, 52, 53, 54, 55]
    slots = ExpertCachePolicy(EXPERTS, EXPERTS_PER_TOKEN, [first])
    simulate(trace(first, 1000), slots)
    changed = simulate(trace(second, 600, seed=2), slots)
    fixed = simulate(
        trace(second, 600, seed=2), ExpertCachePolicy(EXPERTS, EXPERTS_PER_TOKEN, [first]), swapping=False
    )
    assert set(np.flatnonzero(slots.slots[0] >= 0)) == set(second)
    assert changed.hit_rate > 0.4 > 0.1 > fixed.hit_rate


def test_equally_used_experts_rarely_change() -> None:
    random = np.random.default_rng(3)
    alike = np.array([[random.choice(EXPERTS, EXPERTS_PER_TOKEN, replace=False) for _ in range(2000)]])
    assert simulate(alike, ExpertCachePolicy(EXPERTS, EXPERTS_PER_TOKEN, [range(16)])).copies < 40
    restless = ExpertUsage(certainty=0.0, cost=0.0)
    assert simulate(alike, ExpertCachePolicy(EXPERTS, EXPERTS_PER_TOKEN, [range(16)], restless)).copies > 400


def test_alternating_tokens_load_experts_after_uniform_routing() -> None:
    random = np.random.default_rng(4)
    even, few = (
        np.array([[random.choice(128, 8, replace=False) for _ in range(count)]]) for count in (600, 6)
    )
    slots = ExpertCachePolicy(128, 8, [range(72)])
    assert simulate(even, slots).copies == 0
    alternating = np.tile(few, (1, 100, 1))
    before = simulate(alternating[:, :60], slots).hit_rate
    simulate(alternating[:, 60:], slots)
    settled = simulate(alternating[:, :60], slots)
    assert before < 0.8
    assert settled.hit_rate == 1.0


def test_nothing_is_proposed_without_counts_or_changes() -> None:
    assert ExpertCachePolicy(4, 2, [[0, 1]]).proposals() == []
    empty: list[list[int]] = [[]]
    for residents in (empty, [[0, 1, 2, 3]]):
        slots = ExpertCachePolicy(4, 1, residents, ExpertUsage(cost=0.0, certainty=0.0))
        slots.record(np.array([[0, 0, 5, 9]]))
        assert slots.proposals() == []


def test_the_largest_gain_is_loaded_first_and_a_pending_expert_is_not_requested_again() -> None:
    slots = ExpertCachePolicy(4, 1, [[0, 1], [2, 3]], ExpertUsage(certainty=0.0, cost=4.0))
    slots.record(np.array([[10, 30, 60, 0], [100, 0, 0, 0]]))
    first, second = slots.proposals()
    assert (first.layer, first.expert, first.evicted, first.slot) == (1, 0, 2, 0)
    assert first.gain == 100 * 1.0 - 4.0
    assert (second.layer, second.expert, second.evicted, second.slot) == (0, 2, 0, 0)
    slots.begin(first)
    assert slots.slots[1].tolist() == [-1, -1, -1, 1]
    assert [swap.layer for swap in slots.proposals()] == [0]
    slots.finish_swap(first)
    assert slots.slots[1].tolist() == [0, -1, -1, 1]


def test_an_update_loads_a_limited_number_of_experts_of_a_layer() -> None:
    usage = ExpertUsage(certainty=0.0, cost=0.0, a_layer=2, at_once=3)
    slots = ExpertCachePolicy(8, 4, [[0, 1, 2, 3]] * 2, usage)
    slots.record(np.array([[0, 0, 0, 0, 9, 9, 9, 9]] * 2))
    result = slots.proposals()
    assert len(result) == 3
    assert {swap.layer for swap in result} == {0, 1}
    assert (
        len({(swap.layer, swap.expert) for swap in result}) == len({(s.layer, s.slot) for s in result}) == 3
    )


def test_the_update_interval_grows_without_changes_and_shrinks_with_them() -> None:
    usage = ExpertUsage(check_interval=16, max_check_interval=128)
    slots = ExpertCachePolicy(8, 4, [[0, 1, 2, 3]], usage)
    waits = []
    for _ in range(5):
        slots.record(np.array([[20, 20, 20, 20, 0, 0, 0, 0]]))
        slots.proposals()
        waits.append(slots.check_interval)
    assert waits == [32, 64, 128, 128, 128]
    slots.record(np.array([[0, 0, 0, 0, 900, 900, 900, 900]]))
    assert slots.proposals()
    assert slots.check_interval == 16


def test_a_slot_is_unassigned_while_it_is_written() -> None:
    requested = np.full((1, 40, 1), 7)
    slots = ExpertCachePolicy(EXPERTS, 1, [[0]], ExpertUsage(certainty=0.0, cost=4.0, check_interval=8))
    slow = simulate(requested, slots, tokens_per_copy=10)
    assert slow.copies == 1
    assert slow.hits == 40 - 8 - 10
    assert slow.requested == 40
