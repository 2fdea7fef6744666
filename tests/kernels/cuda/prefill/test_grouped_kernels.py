"""Products of rows grouped by expert, and their weighted sum, against numpy."""

from typing import Any

import numpy as np
import pytest
import torch

from edgeinfer_kernels.cuda.prefill.expert_matmul import (
    ExpertRows,
    add_experts,
    expert_product,
    expert_tile,
    grouped_product,
    grouped_tile,
    max_tiles,
    sorted_tiles,
)
from edgeinfer_kernels.cuda.prefill.grouped_kernels import group_assignments_kernel
from tests.kernels.cuda.device_matrices import device_matrix, normal_rows
from tests.kernels.cuda.weights.test_packing import columns_for, decoded

NAN = float("nan")


def tensor(device: str, values: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=dtype, device=device)


@pytest.mark.parametrize("capability", [75, 90])
@pytest.mark.parametrize(("outputs", "columns"), [(48, 96), (130, 192)])
@pytest.mark.parametrize("indexed", [False, True])
def test_each_row_is_multiplied_by_its_expert(
    device: str, capability: int, outputs: int, columns: int, indexed: bool
) -> None:
    random, tile, counts = np.random.default_rng(columns), grouped_tile(capability), (3, 70, 1)
    count = sum(counts)
    rows = random.standard_normal((90, columns)).astype(np.float16)
    weights = random.standard_normal((3, outputs, columns)).astype(np.float16)
    index = random.integers(0, len(rows), count) if indexed else np.arange(count)
    expert = np.repeat(range(3), counts)
    tiles, end = [], 0
    for number, each in enumerate(counts):
        tiles += [(number, row, end + each) for row in range(end, end + each, tile.rows)]
        end += each
    out = torch.full((count + 1, outputs + 9), NAN, device=device)
    grouped_product(
        tensor(device, rows, torch.float16),
        tensor(device, index, torch.int32) if indexed else None,
        tensor(device, weights, torch.float16),
        tensor(device, tiles, torch.int32),
        out,
        5,
        tile,
    )
    result = out.cpu().numpy()
    expected = np.einsum("rc,roc->ro", rows[index].astype(np.float64), weights[expert].astype(np.float64))
    np.testing.assert_allclose(result[:count, 5 : 5 + outputs], expected, rtol=1e-3, atol=1e-2)
    assert np.isnan(result[:, :5]).all()
    assert np.isnan(result[:, 5 + outputs :]).all()
    assert np.isnan(result[count]).all()


@pytest.mark.parametrize(("tokens", "count", "used"), [(1, 3, 1), (50, 9, 4), (7, 5, 5)])
def test_assignments_are_sorted_by_expert_slot(device: str, tokens: int, count: int, used: int) -> None:
    random = np.random.default_rng([tokens, count])
    ids = np.stack([random.permutation(count)[:used] for _ in range(tokens)]).reshape(-1)
    here = list(random.permutation(count)[: count // 2])
    there = [expert for expert in range(count) if expert not in here]
    both = np.full((2, count), -1)
    both[0, here], both[1, there] = range(len(here)), range(len(there))
    of_expert = np.argsort([*here, *there])
    expected = of_expert[ids]
    order = np.argsort(expected, kind="stable")
    result = torch.full((4, len(ids) + 1), -7, dtype=torch.int32, device=device)
    counts = torch.full((count + 1,), -7, dtype=torch.int32, device=device)
    group_assignments_kernel[(count,)](
        tensor(device, ids, torch.int32), tensor(device, both, torch.int32), *result, counts, len(ids),
        len(here), EXPERTS=count, EXPERTS_PER_TOKEN=used, STEP=16,
    )  # fmt: skip
    slots, positions, sorted_tokens, row_slots = result[:, :-1].cpu().numpy()
    np.testing.assert_array_equal(slots, expected)
    np.testing.assert_array_equal(positions[order], np.arange(len(ids)))
    np.testing.assert_array_equal(sorted_tokens, order // used)
    np.testing.assert_array_equal(row_slots, expected[order])
    np.testing.assert_array_equal(counts[:-1].cpu().numpy(), np.bincount(expected, minlength=count))
    assert (result[:, -1] == -7).all()
    assert counts[-1] == -7


@pytest.mark.parametrize("biased", [False, True])
def test_a_token_gets_the_weighted_sum_of_its_experts(device: str, biased: bool) -> None:
    random, tokens, used, width, first, count = np.random.default_rng(3), 7, 3, 63, 4, 11
    slots = np.stack([random.permutation(5)[:used] for _ in range(tokens)]).reshape(-1)
    order = np.argsort(slots, kind="stable")
    positions = np.empty_like(order)
    positions[order] = np.arange(len(order))
    weights = random.uniform(0.1, 1, len(order))
    y, scales = random.standard_normal((count, width)), random.choice([1.0, 2.0], count)
    bias = random.standard_normal((6, width)) if biased else np.zeros((6, width))
    before = random.standard_normal((tokens, width))
    expected = before.copy()
    for pair, slot in enumerate(slots):
        row = positions[pair] - first
        if 0 <= row < count:
            expected[pair // used] += weights[pair] * (scales[row] * y[row] + bias[slot + 1])
    total = tensor(device, before, torch.float32)
    with_nan = np.vstack([y, np.full((1, width), NAN)])
    selection = ExpertRows(
        slots=tensor(device, slots, torch.int32),
        weights=tensor(device, weights, torch.float32),
        tokens=tensor(device, order // used, torch.int32),
        positions=tensor(device, positions, torch.int32),
        row_slots=tensor(device, slots[order], torch.int32),
    )
    given = tensor(device, bias.reshape(-1), torch.float32) if biased else None
    add_experts(
        tensor(device, with_nan, torch.float32),
        tensor(device, scales, torch.float32),
        given,
        selection,
        total,
        first,
        count,
        -1,
    )
    np.testing.assert_allclose(total.cpu().numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("count", "rows"), [(300, 16), (40, 64)])
def test_tiles_cover_every_sorted_row_once(device: str, count: int, rows: int) -> None:
    random, slots = np.random.default_rng(count), 9
    counts = np.bincount(random.integers(0, slots, count) // 2 * 2, minlength=slots)
    tiles = sorted_tiles(tensor(device, counts, torch.int32), count, rows).cpu().numpy()
    assert len(tiles) == max_tiles(count, slots, rows)
    ends = np.cumsum(counts)
    expected = [
        (slot, row, ends[slot])
        for slot in range(slots)
        for row in range(ends[slot] - counts[slot], ends[slot], rows)
    ]
    np.testing.assert_array_equal(tiles[: len(expected)], expected)
    assert not tiles[len(expected) :].any()


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("capability", [75, 90])
@pytest.mark.parametrize(("name", "outputs"), [("Q4_0", 16), ("Q4_K", 80), ("Q8_0", 48), ("F16", 64)])
@pytest.mark.parametrize("indexed", [False, True])
def test_stored_experts_are_multiplied_with_their_rows(
    device: str, capability: int, name: str, outputs: int, indexed: bool
) -> None:
    random, columns, counts = np.random.default_rng(outputs), columns_for(name), (3, 0, 40, 1)
    count = sum(counts)
    raw = normal_rows(name, len(counts) * outputs, columns)
    matrix = device_matrix(device, name, raw, columns)
    rows = random.standard_normal((60, columns)).astype(np.float16)
    index = random.integers(0, len(rows), count) if indexed else np.arange(count)
    tile = expert_tile(capability, count, len(counts))
    tiles = sorted_tiles(tensor(device, counts, torch.int32), count, tile.rows)
    out = torch.full((count + 1, outputs), NAN, device=device)
    expert_product(
        tensor(device, rows, torch.float16),
        tensor(device, index, torch.int32) if indexed else None,
        matrix,
        outputs,
        tiles,
        tile,
        out,
    )
    weights = decoded(name, raw).reshape(len(counts), outputs, columns).astype(np.float16)
    expert = np.repeat(range(len(counts)), counts)
    expected = np.einsum("rc,roc->ro", rows[index].astype(np.float64), weights[expert].astype(np.float64))
    np.testing.assert_allclose(out[:count].cpu().numpy(), expected, rtol=1e-3, atol=1e-2)
    assert torch.isnan(out[count]).all()
