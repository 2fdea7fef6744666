"""The multiple-choice knapsack: equal to brute force on small cases, near the bound on large ones."""

import itertools

import numpy as np
import pytest

from edgeinfer_quant_formats.quantizer.knapsack import Options, select_options


def random_groups(seed: int, groups: int, options: int) -> list[Options]:
    random = np.random.default_rng(seed)
    costs = random.integers(1, 50, (groups, options)).astype(np.float64)
    return [Options(cost, random.random(options) ** 3) for cost in costs]


def totals(groups: list[Options], selected: list[int]) -> tuple[float, float]:
    pairs = list(zip(groups, selected, strict=True))
    return sum(float(g.costs[i]) for g, i in pairs), sum(float(g.losses[i]) for g, i in pairs)


@pytest.mark.parametrize("seed", range(12))
def test_the_selection_is_that_of_brute_force(seed: int) -> None:
    groups = random_groups(seed, 6, 4)
    every = [totals(groups, list(each)) for each in itertools.product(range(4), repeat=6)]
    for budget in (20.0, 60.0, 100.0, 300.0):
        fitting = [loss for cost, loss in every if cost <= budget]
        selected = select_options(groups, budget)
        if not fitting:
            assert selected is None
            continue
        assert selected is not None
        cost, loss = totals(groups, selected)
        assert cost <= budget
        assert loss == pytest.approx(min(fitting))


def test_a_large_case_is_near_exact_with_few_totals_and_never_exceeds_the_budget() -> None:
    random = np.random.default_rng(5)
    sizes = random.uniform(1e6, 5e7, 200)
    groups = [
        Options(size * np.array([2.6, 3.4, 4.5, 6.6]), random.random() * 2.0 ** -np.array([0.0, 2, 4, 8]))
        for size in sizes
    ]
    budget = float(sizes.sum() * 4)
    few, many = (select_options(groups, budget, states) for states in (2000, 40000))
    assert few is not None
    assert many is not None
    (cost, loss), (best_cost, best_loss) = totals(groups, few), totals(groups, many)
    assert max(cost, best_cost) <= budget
    assert best_loss <= loss < 1.002 * best_loss
    assert best_loss >= 0.999 * lagrangian_bound(groups, budget)


def lagrangian_bound(groups: list[Options], budget: float) -> float:
    """A bound that no selection is below: max over prices of Σ min(loss + price·cost) - price·budget."""
    prices = np.geomspace(1e-14, 1e-4, 20001)
    total = -prices * budget
    for group in groups:
        total += (group.losses[:, None] + group.costs[:, None] * prices).min(axis=0)
    return float(total.max())


def test_without_groups_nothing_is_selected() -> None:
    assert select_options([], 1.0) == []
