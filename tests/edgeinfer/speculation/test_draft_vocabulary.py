"""From how many rows of the output a draft head drafts: frequent tokens choose the first ones."""

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from edgeinfer.speculation.draft_controller import DraftController
from edgeinfer.speculation.draft_costs import BASELINE_RUN, MAX_DRAFTED, DraftCosts, MeasuredCosts
from edgeinfer.speculation.draft_vocabulary import (
    DECIDED_TOKENS,
    DraftVocabulary,
    short_vocabulary,
)

VOCABULARY, SHORT = 151_936, 38_912
ROW = 0.05
PROMPT = 64


def zipf(count: int, seed: int = 3) -> list[int]:
    """Tokens whose probability is 1 / (id + 1), of a vocabulary whose ids are in this order."""
    weights = 1 / np.arange(1, VOCABULARY + 1)
    ids = np.random.default_rng(seed).choice(VOCABULARY, count, p=weights / weights.sum())
    return [int(token) for token in ids]


def even(count: int, seed: int = 3) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCABULARY, count)]


def controller_with(each: float, short: float) -> DraftController:
    """A controller that knows the costs of draft tokens of all rows and of the first ones, in forwards."""
    controller = DraftController()
    passes = {rows: 1 + ROW * (rows - 1) for rows in range(1, 9)}
    controller.costs.begin(MeasuredCosts(passes, each, 0.0, short))
    for _ in range(BASELINE_RUN):
        controller.length(MAX_DRAFTED)
        controller.record_baseline(1.0)
    return controller


def speed(
    text: Sequence[int], acceptance: float, each: float, short: float, size: int
) -> tuple[float, float]:
    """Tokens per second of a simulated completion after a prompt, and the share of steps with the short
    vocabulary, which has the first `size` ids. A draft token is right with probability `acceptance`, if it
    may be drafted.
    """
    controller, vocabulary = controller_with(each, short), DraftVocabulary(size)
    rng, at, seconds, steps, shorter = random.Random(5), PROMPT, 0.0, 0, 0
    while at < len(text) - 1 - MAX_DRAFTED:
        if controller.cooldown_tokens:
            controller.cooldown_tokens -= 1
            at, seconds = at + 1, seconds + 1.0
            continue
        ids = vocabulary.choose(text[:at], controller) or VOCABULARY
        length = controller.length(MAX_DRAFTED)
        steps, shorter = steps + 1, shorter + (ids < VOCABULARY)
        right = [text[at + n] < ids and rng.random() < acceptance for n in range(length)]
        accepted = next((n for n in range(length) if not right[n]), length)
        draft, forward = length * (short if ids < VOCABULARY else each), 1 + ROW * length
        if length:
            controller.record_step(accepted + 1, 1 + length, length, draft, forward)
            missed = vocabulary.misses(text[at + accepted], controller)
            controller.record_accepted(length, accepted, missed=missed)
        else:
            controller.record_baseline(1.0)
        at, seconds = at + accepted + 1, seconds + draft + forward
    return (at - PROMPT) / seconds, shorter / steps


def test_the_short_vocabulary_is_a_quarter_and_at_least_32768_ids() -> None:
    assert short_vocabulary(248_320, 124_160) == 63_488
    assert short_vocabulary(VOCABULARY, 75_968) == SHORT
    assert short_vocabulary(100_352, 50_176) == 32_768


@pytest.mark.parametrize(("vocabulary", "rows"), [(50_257, 50_257), (70_000, 35_008), (128_256, 32_000)])
def test_small_outputs_have_no_short_vocabulary(vocabulary: int, rows: int) -> None:
    assert short_vocabulary(vocabulary, rows) == 0


def covered(prompt: list[int], generated: list[int]) -> float:
    """The coverage by the ids below 10 after the tokens that were generated after a prompt."""
    vocabulary, controller = DraftVocabulary(10), DraftController()
    for count in range(len(generated) + 1):
        vocabulary.choose([*prompt, *generated[:count]], controller)
    return vocabulary.coverage


def test_the_last_generated_tokens_count_most() -> None:
    assert covered([3] * 300, []) == covered([30] * 300, []) == 0.5
    assert covered([30] * 300, [3] * 100) > 0.95
    assert covered([3] * 300, [30] * 100) < 0.05
    assert covered([3], [3] * 100 + [30] * 50) < 0.5 < covered([3], [30] * 100 + [3] * 50)


def test_another_text_starts_with_what_the_texts_before_it_had() -> None:
    vocabulary, controller = DraftVocabulary(10), DraftController()
    for count in range(1, 60):
        vocabulary.choose([30] * count, controller)
    before = vocabulary.coverage
    vocabulary.choose([3] * 400, controller)
    assert vocabulary.coverage == before


@pytest.mark.parametrize("acceptance", [0.6, 0.8, 0.95])
def test_frequent_tokens_are_drafted_faster_from_the_first_rows(acceptance: float) -> None:
    text = [token if token < SHORT else 7 for token in zipf(3000)]
    whole, _ = speed(text, acceptance, 0.2, 0.1, 0)
    short, used = speed(text, acceptance, 0.2, 0.1, SHORT)
    assert used > 0.9
    assert short > 1.05 * whole


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("costs", [(0.05, 0.02), (0.2, 0.1), (0.5, 0.2)])
def test_even_tokens_are_drafted_from_all_rows(acceptance: float, costs: tuple[float, float]) -> None:
    """Also after a prompt of frequent tokens."""
    text = [5] * PROMPT + even(3000)
    whole, _ = speed(text, acceptance, *costs, 0)
    assert speed(text, acceptance, *costs, SHORT) == (whole, 0.0)


@pytest.mark.parametrize("text", [zipf(3000), even(1500) + zipf(1500), zipf(1500) + even(1500)])
@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("costs", [(0.05, 0.04), (0.1, 0.05), (0.4, 0.2)])
def test_the_decision_costs_little_where_it_gains_nothing(
    text: list[int], acceptance: float, costs: tuple[float, float]
) -> None:
    whole, _ = speed(text, acceptance, *costs, 0)
    assert speed(text, acceptance, *costs, SHORT)[0] > 0.97 * whole


def test_a_short_vocabulary_that_costs_as_much_is_not_used() -> None:
    assert speed([5] * 1000, 0.8, 0.2, 0.2, SHORT)[1] == 0.0
    assert not controller_with(0.2, 0.3).costs.is_short


def test_nothing_is_decided_before_the_costs_are_known() -> None:
    controller = DraftController()
    vocabulary = DraftVocabulary(SHORT)
    assert {vocabulary.choose([5] * length, controller) for length in range(1, 100)} == {0}
    assert DraftCosts().token == 0.0


def counted(controller: DraftController) -> list[float]:
    """The shares that are decided by from now on."""
    shares, choose = list[float](), controller.choose_vocabulary

    def choose_counted(share: float) -> None:
        shares.append(share)
        choose(share)

    replaced: Callable[[float], None] = choose_counted
    setattr(controller, "choose_vocabulary", replaced)  # noqa: B010
    return shares


def test_the_size_is_decided_every_few_generated_tokens() -> None:
    controller, vocabulary = controller_with(0.4, 0.1), DraftVocabulary(SHORT)
    shares, text = counted(controller), [5] * 200
    assert vocabulary.choose(text[:100], controller) == 0
    assert vocabulary.choose(text[: 99 + DECIDED_TOKENS], controller) == 0
    assert not shares
    assert vocabulary.choose(text[: 100 + DECIDED_TOKENS], controller) == SHORT
    assert vocabulary.choose(text[: 101 + DECIDED_TOKENS], controller) == SHORT
    assert len(shares) == 1
    others = text[:101] + [VOCABULARY - 1] * 99
    assert vocabulary.choose(others[:101], controller) == SHORT
    assert vocabulary.choose(others, controller) == 0
    assert len(shares) == 2


def test_tokens_outside_of_the_short_vocabulary_say_nothing_about_the_others() -> None:
    controller, vocabulary = controller_with(0.4, 0.1), DraftVocabulary(SHORT)
    before = controller.acceptance
    for length in range(1, 100):
        vocabulary.choose([5] * length, controller)
    assert 0.95 * before < controller.acceptance < before
    assert vocabulary.misses(SHORT, controller)
    assert not vocabulary.misses(SHORT - 1, controller)
    stats = controller.stats
    controller.record_accepted(3, 0, missed=True)
    assert controller.stats == stats
    assert stats.acceptance == before
    controller.record_accepted(3, 0)
    assert controller.acceptance < before
