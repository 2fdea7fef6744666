"""The order of prefills, and which tokens are counted."""

from collections.abc import Sequence

import pytest

from edgeinfer.benchmarking import measuring
from edgeinfer.benchmarking.bench_targets import wait_until_idle
from edgeinfer.benchmarking.measuring import interleave, repeat
from edgeinfer.benchmarking.workloads import Workload, needed_context, random_ids, workloads

VOCABULARY = 100


class Recorder:
    """Records its calls; `clock` is shared."""

    vocabulary_size = VOCABULARY

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log
        self.held = 0

    def read(self, ids: Sequence[int]) -> None:
        assert self.held + len(ids) <= 64
        self.held += len(ids)
        self.log.append(f"{self.name} reads {len(ids)} to {self.held}")

    def read_all(self, ids: Sequence[int]) -> None:
        self.held += len(ids)
        self.log.append(f"{self.name} verifies {len(ids)} to {self.held}")

    def rewind(self, length: int) -> None:
        self.held = length


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Events in order; a pause between segments is recorded and takes no time."""
    events: list[str] = []
    monkeypatch.setattr(measuring, "wait_until_idle", lambda: events.append("rest"))
    return events


def test_every_repetition_prefills_the_whole_prompt_at_its_depth(log: list[str]) -> None:
    timings = repeat(Recorder("a", log), Workload("prompt", 16, depth=8), repetitions=2)
    assert log == ["a reads 8 to 8", *["a reads 16 to 24"] * 3]
    assert (len(timings.seconds), timings.tokens) == (2, 16)


def test_without_warm_up_nothing_is_prefilled_twice(log: list[str]) -> None:
    repeat(Recorder("a", log), Workload("generate", 3), repetitions=1, warm_up=False)
    assert log == ["a reads 1 to 1", "a reads 1 to 2", "a reads 1 to 3"]


def test_targets_alternate_with_a_pause_between_them(log: list[str]) -> None:
    targets = [Recorder("a", log), Recorder("b", log)]
    ((ours, theirs),) = interleave(targets, [Workload("prompt", 4)], rounds=2)
    assert log == ["rest", "a reads 4 to 4", "rest", "b reads 4 to 4"] * 3
    assert len(ours.seconds) == len(theirs.seconds) == 2
    assert ours.tokens == 4


def test_a_generation_segment_counts_each_token_but_the_first(log: list[str]) -> None:
    workload = Workload("generate", 128, depth=2)
    ((timings,),) = interleave([Recorder("a", log)], [workload], rounds=1, piece=3)
    piece = ["rest", *(f"a reads 1 to {held}" for held in (3, 4, 5, 6))]
    assert log == ["a reads 2 to 2", *piece, *piece]
    assert (len(timings.seconds), timings.tokens) == (3, 1)


def test_a_verification_needs_logits_of_every_token(log: list[str]) -> None:
    ((timings,),) = interleave([Recorder("a", log)], [Workload("verify", 4)], rounds=1, piece=4)
    piece = ["rest", *["a verifies 4 to 4"] * 3]
    assert log == [*piece, *piece]
    assert (len(timings.seconds), timings.tokens) == (2, 4)


def test_workloads_alternate_too(log: list[str]) -> None:
    targets = [Recorder("a", log), Recorder("b", log)]
    expected = [Workload("prompt", 4, 2), Workload("prompt", 8, 2)]
    result = interleave(targets, expected, rounds=1)
    order = ["a reads 4 to 6", "b reads 4 to 6", "a reads 8 to 10", "b reads 8 to 10"]
    assert [line for line in log if line != "rest"][2:] == order * 2
    assert [timings.tokens for pair in result for timings in pair] == [4, 4, 8, 8]


def test_progress_names_rounds(log: list[str]) -> None:
    received: list[tuple[int, int]] = []
    interleave(
        [Recorder("a", log)],
        [Workload("prompt", 1)],
        rounds=2,
        report=lambda done, of: received.append((done, of)),
    )
    assert received == [(0, 2), (1, 2), (2, 2)]


def test_workloads_have_the_names_of_llama_bench() -> None:
    result = workloads([512, 0], [128], [0, 4096])
    assert [each.name for each in result] == ["pp512", "tg128", "pp512 @ d4096", "tg128 @ d4096"]
    assert needed_context(result) == 4096 + 512 + 1


def test_random_ids_are_the_same_for_the_same_seed() -> None:
    assert random_ids(50, VOCABULARY, 1)[:20] == random_ids(20, VOCABULARY, 1)
    assert random_ids(50, VOCABULARY, 1) != random_ids(50, VOCABULARY, 2)
    assert all(0 <= token < VOCABULARY for token in random_ids(1000, VOCABULARY, 3))


def test_a_pause_ends() -> None:
    assert wait_until_idle() > 0
