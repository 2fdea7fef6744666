"""Which cases of a parametrized test are in the default tier."""

import pytest

from tests.conftest import covering, default_cases, values_and_pairs

CASES = [{("isa", isa), ("format", name)} for isa in "ab" for name in "wxyz"]
"""Two parameters, of two and of four values."""


def test_the_fewest_cases_that_cover_every_value_are_selected() -> None:
    chosen = default_cases(CASES)
    assert len(chosen) == 4
    assert set[tuple[str, str]]().union(*(CASES[index] for index in chosen)) == set().union(*CASES)


@pytest.mark.parametrize(("count", "values"), [(1, 2), (2, 4), (3, 5), (4, 6), (8, 6)])
def test_a_number_of_cases_covers_as_many_values_as_possible(count: int, values: int) -> None:
    chosen = default_cases(CASES, count)
    assert len(chosen) == count
    assert len(set[tuple[str, str]]().union(*(CASES[index] for index in chosen))) == values


def test_a_number_above_the_case_count_selects_all() -> None:
    assert default_cases(CASES[:3], 9) == {0, 1, 2}


def test_a_test_without_parameters_is_selected() -> None:
    assert default_cases([set()]) == {0}


def test_slow_cases_add_the_pairs_that_default_cases_lack() -> None:
    three = [
        {("isa", isa), ("format", name), ("tokens", n)} for isa in "ab" for name in "wxyz" for n in "123"
    ]
    pairs = [values_and_pairs(case) for case in three]
    needed = covering(pairs, {0, 23})
    assert {0, 23} <= needed
    assert set().union(*(pairs[index] for index in needed)) == set().union(*pairs)
    assert len(needed) < 18


def test_slow_cases_add_every_value_of_a_test_with_one_parameter() -> None:
    cases = [values_and_pairs({("name", name)}) for name in "wxyz"]
    assert covering(cases, {1}) == {0, 1, 2, 3}
