"""Runs of several drafts and the steps that verify them against the same drafts and steps one by one."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from edgeinfer.model_config.layers.draft_head import read_draft_head
from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer.registry.registry import find_model
from edgeinfer.tokenizer.tokenizer import Tokenizer
from edgeinfer_kernels.caches.state_rows import StateRows
from edgeinfer_kernels.cpu.backend import CpuBackend, CpuOptions
from edgeinfer_kernels.cpu.compiler.kernel_units import kernel_units, row_units
from edgeinfer_kernels.cpu.draft import draft_cycles
from edgeinfer_kernels.cpu.layout.packed_matrix import byte_view
from edgeinfer_kernels.cpu.runtime.abi import MAX_DRAFT_CYCLES
from edgeinfer_kernels.cpu.runtime.block_args import EmbedArgs
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.draft_loop import CyclesRequest, DraftCycle, DraftRequest, DraftSampling
from edgeinfer_quant_formats import GGUFFile
from tests.kernels.conftest import BEST, built_kernels

pytestmark = pytest.mark.default_cases(1)
CONTEXT, ROWS = 192, 128
STORY = "Once upon a time, there was a little girl named Lily. She had a red ball. One day, she went to the"
NEVER = frozenset[int]()


@dataclass
class Pair:
    """The built-in model and its head on the same threads, for a text that begins with `prompt`."""

    target: CpuBackend
    head: CpuBackend
    prompt: list[int]
    rows: StateRows = field(init=False)
    text: list[int] = field(init=False)
    done: int = field(init=False)

    def begin(self) -> None:
        """Read the prompt; its last token follows in the first cycle."""
        ids = self.prompt[:-1]
        for backend in (self.target, self.head):
            for array in backend.snapshot(CONTEXT):  # a view
                array[:] = 0
        self.rows = StateRows(np.full((ROWS, self.target.spec.hidden_size), np.nan, np.float32), 0, ROWS)
        self.text, self.done = list(self.prompt), len(ids) - 1
        self.target.step_logits(ids[:16], 0)
        self._keep(0, 16)
        for at in range(16, len(ids)):
            self.target.step_logits(ids[at : at + 1], at)
            self._keep(at, 1)
        self.head.set_hidden(self.rows[: self.done], 0)
        x = self.head.embed(ids[1:])
        self.head.forward(x, 0)

    def _keep(self, at: int, count: int) -> None:
        self.target.write_draft_states(self.target.kept_hidden(count)[0], self.rows[at : at + count])

    def given(self) -> list[int]:
        """The tokens that the head reads before the next draft."""
        tokens = self.text[self.done + 1 :]
        self.head.set_hidden(self.rows[self.done : self.done + len(tokens)], self.done)
        return tokens

    def cycle(self, request: DraftRequest, ends: Sequence[int]) -> DraftCycle:
        """A draft and the step that verifies it."""
        tokens = self.given()
        drafted = self.head.draft(tokens, self.done, request)
        start, self.done = len(self.text) - 1, self.done + len(tokens)
        best = self.target.best_ids([self.text[-1], *drafted.ids], start)
        self._keep(start, 1 + len(drafted.ids))
        right = 0
        while right < len(drafted.ids) and best[right] == drafted.ids[right] and best[right] not in ends:
            right += 1
        self.text += best[: right + 1]
        return DraftCycle(drafted.ids, drafted.probs, best[: right + 1], 0.0, 0.0)

    def run(self, request: DraftRequest, limit: int, ends: frozenset[int], cycles: int) -> list[DraftCycle]:
        tokens, start = self.given(), len(self.text) - 1
        run = CyclesRequest(self.text[-1], start, limit, ends, cycles, self.rows[start:])
        found = self.head.draft_cycles(self.target, tokens, self.done, request, run)
        self.done += len(tokens) + sum(len(each.found) for each in found[:-1]) if found else 0
        for each in found:
            self.text += each.found
        return found

    def check_equal(self, expected: "Pair") -> None:
        """Raise unless text, states and caches are those of another pair."""
        assert (self.text, self.done) == (expected.text, expected.done)
        end = len(self.text) - 1
        np.testing.assert_array_equal(self.rows.array[:end], expected.rows.array[:end])
        for own, other in ((self.target, expected.target), (self.head, expected.head)):
            last = end if own is self.target else self.done
            for actual, wanted in zip(own.snapshot(last), other.snapshot(last), strict=True):
                np.testing.assert_array_equal(actual, wanted)


def built_in_pair(threads: int) -> Pair:
    model = find_model("tiny")
    assert model.head_path is not None
    file, head_file = GGUFFile.open(model.path), GGUFFile.open(model.head_path)
    config = read_config(file)
    spec, weights = config.specification(), read_weights(file, config)
    draft_head = read_draft_head(head_file, config, weights)
    units = [
        *kernel_units(weights),
        *kernel_units(draft_head.weights),
        *row_units([weights.token_embd.format]),
    ]
    kernels = built_kernels(BEST, list(dict.fromkeys(units)))
    state = DecoderState.allocate(spec, CONTEXT, "f16")
    target = CpuBackend(spec, weights, state, kernels, CpuOptions(64, threads))
    target.keep_hidden([len(spec.layers)])
    own_state = DecoderState.allocate(draft_head.spec, CONTEXT, "f16")
    head = CpuBackend(
        draft_head.spec, draft_head.weights, own_state, kernels, CpuOptions(64), pool=target.pool
    )
    assert min(target.capabilities.max_draft_cycles, head.capabilities.max_draft_cycles) == MAX_DRAFT_CYCLES
    return Pair(target, head, Tokenizer.from_gguf(model.path).encode(STORY))


@pytest.fixture(scope="module", params=[2, 1, 3])
def pairs(request: pytest.FixtureRequest) -> Iterator[tuple[Pair, Pair]]:
    made = built_in_pair(request.param), built_in_pair(1)
    yield made
    for each in made:
        each.head.close()
        each.target.close()


def drafts_of(tokens: int, min_prob: float = 0.0, further: float = 0.0) -> DraftRequest:
    return DraftRequest([min_prob] * tokens, [further] * tokens, 1 << 20, DraftSampling())


def found_in(cycles: Sequence[DraftCycle]) -> list[DraftCycle]:
    """The cycles without their times."""
    return [each._replace(draft_seconds=0.0, step_seconds=0.0) for each in cycles]


@pytest.mark.default_cases
@pytest.mark.parametrize("cycles", [8, 3, 1])
@pytest.mark.parametrize(
    "request_", [drafts_of(7), drafts_of(1), drafts_of(7, 0.3, 0.5)], ids=["seven", "one", "probable"]
)
def test_a_run_leaves_what_its_cycles_leave_one_by_one(
    pairs: tuple[Pair, Pair], request_: DraftRequest, cycles: int
) -> None:
    actual, expected = pairs
    for pair in pairs:
        pair.begin()
    for _ in range(2):  # the second run continues the first one
        wanted = [expected.cycle(request_, ()) for _ in range(cycles)]
        found = actual.run(request_, 1000, NEVER, cycles)
        assert found_in(found) == wanted
        assert all(each.draft_seconds > 0 and each.step_seconds > 0 for each in found)
        actual.check_equal(expected)
    lengths = {len(each.found) for each in wanted}
    assert len(lengths) > 1 or cycles == 1  # some drafts were right and some weren't


def test_an_improbable_token_is_not_verified(pairs: tuple[Pair, Pair]) -> None:
    actual, expected = pairs
    for pair in pairs:
        pair.begin()
    request = drafts_of(5, 0.9)
    wanted = [expected.cycle(request, ()) for _ in range(8)]
    assert found_in(actual.run(request, 1000, NEVER, 8)) == wanted
    assert {0} < {len(each.ids) for each in wanted}
    actual.check_equal(expected)


@pytest.mark.default_cases
@pytest.mark.parametrize("limit", [9, 5, 4])
def test_a_run_ends_where_no_token_is_left_to_draft(pairs: tuple[Pair, Pair], limit: int) -> None:
    actual, expected = pairs
    for pair in pairs:
        pair.begin()
    wanted, left = list[DraftCycle](), limit
    while left > 0:
        wanted.append(expected.cycle(drafts_of(min(4, left)), ()))
        left -= len(wanted[-1].found)
    assert found_in(actual.run(drafts_of(4), limit, NEVER, 8)) == wanted
    assert sum(len(each.found) for each in wanted) <= limit + 1
    actual.check_equal(expected)


def test_a_run_ends_after_an_end_token(pairs: tuple[Pair, Pair]) -> None:
    actual, expected = pairs
    expected.begin()
    found = [expected.cycle(drafts_of(4), ()) for _ in range(6)]
    tokens = [token for each in found for token in each.found]
    ends = [tokens.index(token) for token in dict.fromkeys(tokens)]
    for at in ends[::3]:
        for pair in pairs:
            pair.begin()
        wanted = list[DraftCycle]()
        while not wanted or wanted[-1].found[-1] != tokens[at]:
            wanted.append(expected.cycle(drafts_of(4), [tokens[at]]))
        assert found_in(actual.run(drafts_of(4), 1000, frozenset([1 << 20, tokens[at]]), 8)) == wanted
        assert actual.text[len(actual.prompt) :] == tokens[: at + 1]
        actual.check_equal(expected)


def test_a_step_with_invalid_logits_ends_a_run_and_is_left_out(pairs: tuple[Pair, Pair]) -> None:
    actual, expected = pairs
    expected.begin()
    wanted, read = list[DraftCycle](), list[set[int]]()
    for _ in range(8):
        last = expected.text[-1]
        wanted.append(expected.cycle(drafts_of(2), ()))
        read.append({last, *wanted[-1].ids})
    first = {token: index for index, ids in reversed(list(enumerate(read))) for token in ids}
    embed = EmbedArgs.from_address(actual.target.decoder.embedding.block)
    whole = byte_view(embed.source, embed.row_bytes * actual.target.spec.vocabulary_size).copy()
    for index in (0, 1, 4):
        token = next(each for each, at in first.items() if at == index and each not in actual.prompt[:-1])
        damaged, source = whole.copy(), embed.source
        damaged[token * embed.row_bytes :][: embed.row_bytes] = 0xFF  # as float16: NaN
        for pair in pairs:
            pair.begin()
        for _ in range(index):
            expected.cycle(drafts_of(2), ())
        embed.source = damaged.ctypes.data
        try:
            found = actual.run(drafts_of(2), 1000, NEVER, 8)
        finally:
            embed.source = source
        assert found_in(found) == wanted[:index]
        # What comes after the text in the caches has no effect.
        assert found_in(actual.run(drafts_of(2), 1000, NEVER, 4)) == wanted[index : index + 4]


class ScriptedClock:
    """A clock like `NativeClock` that tells the given times, in seconds and nanoseconds."""

    argument, multiple, tick = 1, 10**9, 1e-9

    def __init__(self, times: Sequence[tuple[int, int]]) -> None:
        remaining = iter(times)

        def write_next(_: int, at: int) -> None:
            seconds, nanoseconds = next(remaining)
            (ctypes.c_int64 * 2).from_address(at)[:] = [seconds, nanoseconds]

        self.callback = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(write_next)
        self.function = ctypes.cast(self.callback, ctypes.c_void_p).value


def test_times_of_more_than_a_second_are_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [(7, 999_999_000), (9, 1_000), (9, 4_000)]
    monkeypatch.setattr(draft_cycles, "NativeClock", lambda: ScriptedClock(times))
    pair = built_in_pair(1)
    pair.begin()
    (found,) = pair.run(drafts_of(2), 1000, NEVER, 1)
    assert (found.draft_seconds, found.step_seconds) == pytest.approx((1.000002, 3e-6))
    pair.head.close()
    pair.target.close()


def test_another_target_too_many_cycles_or_too_few_rows_are_refused(pairs: tuple[Pair, Pair]) -> None:
    actual, expected = pairs
    actual.begin()
    tokens, run = actual.given(), CyclesRequest(actual.text[-1], 3, 9, NEVER, 17, actual.rows)
    with pytest.raises(ValueError, match="same thread pool"):
        actual.head.draft_cycles(expected.target, tokens, actual.done, drafts_of(3), run)
    with pytest.raises(ValueError, match="17 cycles with 3 of 9 tokens; wanted 1 to 16"):
        actual.head.draft_cycles(actual.target, tokens, actual.done, drafts_of(3), run)
    run = run._replace(max_cycles=4, limit=10, states=actual.rows[: run.limit + 1])
    with pytest.raises(ValueError, match="space for 10 states, wanted 11"):
        actual.head.draft_cycles(actual.target, tokens, actual.done, drafts_of(3), run)
