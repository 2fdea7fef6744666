"""Sums and logits of all ranks by words that the ranks send each other: this rank's kernel, with words that
others have sent.
"""

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from edgeinfer_kernels.cuda.decode.captured_steps import RING
from edgeinfer_kernels.cuda.tensor import peer_trial
from edgeinfer_kernels.cuda.tensor.logit_kernels import best_of_ranks_kernel, gather_logits_kernel
from edgeinfer_kernels.cuda.tensor.peer_kernels import sum_residual_kernel, sum_rows_kernel
from edgeinfer_kernels.cuda.triton_ops.kernel_args import InboxArgs, WordsConfig
from edgeinfer_kernels.cuda.weights.plane_formats import padded_blocks
from edgeinfer_kernels.sizes.cuda_buffers import CACHED_AT, STATE_WORDS
from tests.kernels.cuda.conftest import HAS_GPU

TOKENS, WIDTH, COLUMNS, PLANES = 3, 336, 128, 44
POLLS = 4
FIRSTS = {2: (0, 208, 336), 3: (0, 160, 176, 336)}
"""The first row of each rank, and the end."""
DEVICE = "cuda" if HAS_GPU else "cpu"


class Inboxes:
    """Those of `ranks` in one process, with the words number `sent` from all to rank `rank`."""

    def __init__(self, ranks: int, rank: int, sent: int) -> None:
        torch.manual_seed(ranks)
        self.parts = torch.randn((ranks, TOKENS, WIDTH))
        self.words = torch.full((ranks, 2, ranks, TOKENS, WIDTH), -1, dtype=torch.int64)
        number = (sent + (1 << 31)) % (1 << 32) - (1 << 31)
        bits = self.parts.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        for other in range(ranks):
            if other != rank:
                self.words[rank, number & 1, other] = (number << 32) | bits[other]
        self.expected = (number << 32) | bits[rank]
        self.place = number & 1
        self.before = (sent - 1 + (1 << 31)) % (1 << 32) - (1 << 31)
        self.numbers = torch.full((TOKENS, WIDTH), self.before, dtype=torch.int32, device=DEVICE)
        self.words = self.words.to(DEVICE)
        inboxes = tuple(self.words[each] for each in range(ranks))
        self.args = InboxArgs(inboxes, inboxes[rank], self.numbers, rank, TOKENS, WIDTH)
        self.rank, self.number = rank, number

    def check_sent(self) -> None:
        """This rank's words are in all other inboxes, nothing else is changed there."""
        for other in range(len(self.parts)):
            if other != self.rank:
                words = self.words[other].cpu()
                assert (words[self.place, self.rank] == self.expected).all()
                assert (words == -1).sum() == words.numel() - self.expected.numel()
        numbers = self.numbers.cpu()
        assert (numbers[:, ::COLUMNS] == self.number).all()
        numbers[:, ::COLUMNS] = self.before
        assert (numbers == self.before).all()

    def rows(self) -> Tensor:
        """This rank's, with more columns than are read."""
        y = torch.full((TOKENS, WIDTH + 16), float("nan"))
        y[:, :WIDTH] = self.parts[self.rank]
        return y.to(DEVICE)


@pytest.mark.parametrize(
    ("ranks", "rank", "sent"), [(2, 0, 1), (2, 1, 2), (3, 1, 7), (2, 0, 1 << 31), (2, 1, 1 << 32), (5, 4, 3)]
)
def test_rows_are_summed_and_sent(ranks: int, rank: int, sent: int) -> None:
    inboxes = Inboxes(ranks, rank, sent)
    y = inboxes.rows()
    sum_rows_kernel[(3, TOKENS)](
        inboxes.args, y, y.stride(0), WIDTH=WIDTH, COLUMNS=COLUMNS, POLLS=POLLS, DEPENDENT=False
    )
    torch.testing.assert_close(y[:, :WIDTH].cpu(), inboxes.parts.sum(0), rtol=1e-6, atol=1e-6)
    assert y[:, WIDTH:].isnan().all()
    inboxes.check_sent()


@pytest.mark.parametrize(("ranks", "has_gain"), [(2, True), (2, False), (3, True), (1, True)])
def test_sums_are_added_to_x_with_sums_of_squares_and_activations(ranks: int, has_gain: bool) -> None:
    inboxes = Inboxes(ranks, 0, 2)
    y, blocks = inboxes.rows(), padded_blocks(WIDTH)
    x, gain = torch.randn((TOKENS, WIDTH)), torch.rand(WIDTH)
    out = torch.full((TOKENS, PLANES, blocks), -1, dtype=torch.int32, device=DEVICE)
    squares = torch.full((TOKENS, WIDTH // 16), float("nan"), device=DEVICE)
    found = x.to(DEVICE, copy=True)
    sum_residual_kernel[(blocks * 32 // COLUMNS, TOKENS)](
        inboxes.args if ranks > 1 else None, y, y.stride(0), found, 0.5, gain.to(DEVICE), out, squares,
        WIDTH=WIDTH, COLUMNS=COLUMNS, OUT=WordsConfig(blocks, PLANES), POLLS=POLLS, GAIN=has_gain,
        DEPENDENT=False,
    )  # fmt: skip
    expected = x + 0.5 * inboxes.parts.sum(0)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(squares.cpu(), expected.view(TOKENS, -1, 16).square().sum(2))
    floats = out.cpu()[:, 12:].view(torch.float32).reshape(TOKENS, 32, 8, blocks // 8)
    values = floats.permute(0, 3, 2, 1).reshape(TOKENS, -1)
    torch.testing.assert_close(values[:, :WIDTH], expected * (gain if has_gain else 1.0))
    assert (values[:, WIDTH:] == 0).all()
    if ranks > 1:
        inboxes.check_sent()


@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (2, 1), (3, 1)])
def test_logits_of_unequal_parts_are_gathered(ranks: int, rank: int) -> None:
    inboxes, firsts = Inboxes(ranks, rank, 5), FIRSTS[ranks]
    counts = [after - first for first, after in pairwise(firsts)]
    own = inboxes.parts[rank, :, : counts[rank]].contiguous().to(DEVICE)
    logits = torch.full((TOKENS, firsts[-1] + 2), float("nan"), device=DEVICE)
    gather_logits_kernel[(2, TOKENS)](
        inboxes.args, own, logits, firsts,
        VOCABULARY=firsts[-1] + 2, COLUMNS=COLUMNS, POLLS=POLLS, DEPENDENT=False,
    )  # fmt: skip
    parts = [part[:, :count] for part, count in zip(inboxes.parts, counts, strict=True)]
    assert torch.equal(logits.cpu()[:, :-2], torch.cat(parts, dim=1))
    assert logits[:, -2:].isnan().all()


@pytest.mark.parametrize(
    ("ranks", "rank", "tops", "expected"),
    [
        (2, 0, (1.5, 1.0), 0),
        (2, 0, (1.5, 2.0), 1),
        (2, 1, (1.5, 1.5), 0),
        (3, 1, (-3.0, -2.0, -1.0), 2),
        (2, 0, (1.5, float("nan")), None),
        (2, 0, (float("nan"), 1.5), None),
        (2, 1, (float("-inf"), float("-inf")), None),
    ],
)
def test_the_best_logit_of_all_ranks_is_the_next_token(
    ranks: int, rank: int, tops: tuple[float, ...], expected: int | None
) -> None:
    inboxes, firsts = Inboxes(ranks, rank, 2), FIRSTS[ranks]
    ids = [first + 3 for first in firsts[:-1]]
    for other in range(ranks):
        if other != rank:
            pair = torch.tensor([tops[other], 0.0]).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
            pair[1] = ids[other]
            inboxes.words[rank, 0, other, 0, :2] = ((2 << 32) | pair).to(DEVICE)
    best = torch.full((1, 5), float("-inf"), device=DEVICE)
    best[0, 2] = tops[rank]
    best_ids = torch.tensor([9, 8, 3, 7, 6], dtype=torch.int32, device=DEVICE)
    state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=DEVICE)
    state[CACHED_AT] = 70
    sampled = torch.full((RING,), -2, dtype=torch.int32, device=DEVICE)
    best_of_ranks_kernel[(1,)](
        inboxes.args, best, best_ids, firsts, state, sampled,
        PROGRAMS=5, RING=RING, POLLS=POLLS, DEPENDENT=False,
    )  # fmt: skip
    assert int(sampled[70 % RING]) == (-1 if expected is None else ids[expected])
    assert int(state[0]) == (0 if expected is None else ids[expected])
    assert (sampled == -2).sum() == RING - 1
    if expected is not None:
        assert inboxes.words[1 - min(rank, 1), 0, rank, 0, 1].item() == (2 << 32) | ids[rank]


@pytest.mark.parametrize(
    ("trial", "values"),
    [(peer_trial.steps_add_up, (1.0, 2.0)), (peer_trial.logits_are_gathered, (3.0, 5.0))],
)
def test_a_trial_fails_if_a_later_word_does_not_arrive(
    trial: Callable[[object], bool], values: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`values`: what the other rank has sent in the first two exchanges; it doesn't send a third time."""
    monkeypatch.setattr(peer_trial, "TRIAL_POLLS", POLLS)
    inboxes = Inboxes(2, 0, 1)
    for number, value in enumerate(values, start=1):
        bits = int(torch.tensor(value).view(torch.int32))
        inboxes.words[0, number & 1, 1] = (number << 32) | bits
    peers = SimpleNamespace(
        args=inboxes.args, tokens=TOKENS, columns=WIDTH, device=torch.device(DEVICE), rank=0, ranks=2
    )
    assert not trial(peers)
    assert inboxes.numbers[0, 0] == peer_trial.SUMS
