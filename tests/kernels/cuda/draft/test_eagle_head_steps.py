"""EAGLE-3 heads on a GPU against the numpy formula: kept states, pairs of a text, drafts and trees."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from edgeinfer.model_config.layers.eagle_head import read_eagle_head
from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer_kernels.cuda.decode.device_logits import DeviceRows
from edgeinfer_kernels.cuda.device_parts import DeviceOptions, count_parts
from edgeinfer_kernels.draft_loop import DraftRequest, DraftSampling
from edgeinfer_kernels.sizes import cuda_buffers, cuda_matrices
from edgeinfer_quant_formats import GGUFFile
from tests.edgeinfer.speculation.heads.eagle.random_eagle import RandomEagle
from tests.kernels.cuda.draft.test_draft_head_steps import (
    CHUNK,
    CONTEXT,
    PAIRS,
    TREE,
    Pair,
    States,
    agrees,
    distance,
    exact,
    head_on_device,
    logits_after,
    on_device,
    read,
    text,
)
from tests.kernels.cuda.test_device_sizes import divisible_bytes, most_over
from tests.random_models import RandomModel

TARGET = RandomModel("llama", layers=3, formats=("F16",))
PLAIN = RandomEagle(target_layers=(0, 1, 3), own_table=True)
HEADS = {
    "plain": PLAIN,
    "norms": replace(PLAIN, norm_before_fc=True, norm_before_residual=True, target_layers=(2, 1, 2)),
    "shared": RandomEagle(target_layers=(0, 1, 3), rows=0),
    "Q8_0": replace(PLAIN, width=96, format="Q8_0"),
}


@pytest.fixture
def pair(request: pytest.FixtureRequest, device: str, tmp_path: Path) -> Iterator[Pair]:
    path = HEADS[request.param].write(tmp_path / "head.gguf")
    with GGUFFile.open(TARGET.write(tmp_path / "model.gguf")) as file, GGUFFile.open(path) as own:
        config = read_config(file)
        spec, weights = config.specification(), read_weights(file, config)
        head = read_eagle_head(own, config, weights)
        options = DeviceOptions(
            chunk=CHUNK, kept_states=cuda_buffers.KEPT_STATES, kept_layers=head.target_layers
        )
        target = on_device(spec, weights, device, options)
        table = None if head.own_embedding else target.table
        shared = target.as_target(table, None if head.own_output else target.output)
        on_it = head_on_device(head.spec, head.weights, device, DeviceOptions(chunk=CHUNK, target=shared))
        reference = exact(spec, weights)
        reference.keep_hidden(head.target_layers)
        yield Pair(target, on_it, reference, exact(head.spec, head.weights))
        on_it.close()
        target.close()


def states_of(pair: Pair, ids: list[int]) -> States:
    """The formula's states of a text after the layers that the head reads, side by side."""
    x = pair.exact_target.embed(ids)
    pair.exact_target.forward(x, 0)
    return np.concatenate(pair.exact_target.kept_hidden(len(ids)), axis=1)


def exact_logits(
    pair: Pair, ids: list[int], states: States | None, own: States, start: int
) -> tuple[States, States]:
    """The formula's logits after pairs, and the head's rows after its layer; `states` None: it reads
    `own`.
    """
    if states is None:
        pair.exact_head.set_own_hidden(own, start)
    else:
        pair.exact_head.set_hidden(states, start)
    x = pair.exact_head.embed(ids)
    pair.exact_head.forward(x, start)
    return np.asarray(pair.exact_head.logits(x), np.float64), np.asarray(x, np.float64).copy()


def rows_of(pair: Pair, tokens: list[int]) -> list[int]:
    """The rows of the output that have these token ids."""
    ids = pair.exact_head.weights.output_ids
    return tokens if ids is None else [int(np.flatnonzero(ids == token)[0]) for token in tokens]


NONE = np.empty(0)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("pair", HEADS, indirect=True)
def test_pairs_of_a_text_equal_the_formula(pair: Pair) -> None:
    ids = text(pair, PAIRS + 1)
    states = states_of(pair, ids[:-1])
    read(pair, ids[:-1], (CHUNK, 3, 1, 2))
    for first, last in ((0, 20), (20, 23), (23, PAIRS)):
        actual = logits_after(pair, ids[first + 1 : last + 1], first, first)
        expected, _ = exact_logits(pair, ids[first + 1 : last + 1], states[first:last], NONE, first)
        assert distance(actual, expected) < 0.05


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("given", [1, 5])
@pytest.mark.parametrize("pair", HEADS, indirect=True)
def test_a_whole_draft_continues_with_the_rows_after_the_layer(pair: Pair, given: int) -> None:
    ids = text(pair, 21)
    states, done = states_of(pair, ids[:-1]), 20 - given
    read(pair, ids[:-1], (20,))
    logits_after(pair, ids[1 : done + 1], 0, 0)
    exact_logits(pair, ids[1 : done + 1], states[:done], NONE, 0)
    pair.head.set_hidden(DeviceRows(done, given, False), done)
    request = DraftRequest([0.0] * 5, [0.0] * 5, pair.head.spec.vocabulary_size, DraftSampling())
    drafted = pair.head.draft(ids[done + 1 :], done, request)
    assert len(drafted.ids) == 5
    logits, own = exact_logits(pair, ids[done + 1 :], states[done:], NONE, done)
    for index, (token, prob) in enumerate(zip(drafted.ids, drafted.probs, strict=True)):
        row, (at,) = logits[-1], rows_of(pair, [token])
        assert row[at] >= row.max() - 0.05 * np.abs(row).max()
        assert prob == pytest.approx(np.exp(row[at]) / np.exp(row).sum(), rel=0.1)
        logits, own = exact_logits(pair, [token], None, own[-1:], 20 + index)


@pytest.mark.slow
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("pair", ["Q8_0", "norms"], indirect=True)
def test_a_tree_continues_with_the_rows_of_each_path(pair: Pair) -> None:
    given, power = 4, 0.8
    ids = text(pair, 21 + len(TREE))
    ids, nodes = ids[:21], ids[21:]
    states, done = states_of(pair, ids[:-1]), 20 - given
    read(pair, ids[:-1], (20,))
    logits_after(pair, ids[1 : done + 1], 0, 0)
    exact_logits(pair, ids[1 : done + 1], states[:done], NONE, 0)
    pair.head.set_hidden(DeviceRows(done, given, False), done)

    def in_rows(found: list[tuple[int, float]]) -> list[tuple[int, float]]:
        rows = rows_of(pair, [token for token, _ in found])
        return list(zip(rows, [prob for _, prob in found], strict=True))

    (root,) = pair.head.draft_level(ids[done + 1 :], done, (), 5, power)
    logits, own = exact_logits(pair, ids[done + 1 :], states[done:], NONE, done)
    assert agrees(in_rows(root), logits[-1], power)
    pair.head.draft_level(nodes[:2], 20, TREE[:2], 5, power)
    pair.head.draft_level(nodes[:4], 20, TREE[:4], 5, power)
    found = pair.head.draft_level(nodes, 20, TREE, 5, power)
    for path in ([0, 3], [1, 2, 4]):
        state = own[-1:]
        for depth, node in enumerate(path):
            logits, state = exact_logits(pair, [nodes[node]], None, state, 20 + depth)
            assert agrees(in_rows(found[node]), logits[0], power)


@pytest.mark.parametrize("name", HEADS)
def test_the_counted_bytes_of_a_head_are_those_that_it_allocates(name: str, tmp_path: Path) -> None:
    device, path = torch.device("cpu"), HEADS[name].write(tmp_path / "head.gguf")
    with GGUFFile.open(TARGET.write(tmp_path / "model.gguf")) as file, GGUFFile.open(path) as own:
        config = read_config(file)
        spec, weights = config.specification(), read_weights(file, config)
        head = read_eagle_head(own, config, weights)
        keeping = DeviceOptions(
            chunk=CHUNK, kept_states=cuda_buffers.KEPT_STATES, kept_layers=head.target_layers
        )
        plain, kept = (
            sum(part.nbytes for part in count_parts(spec, weights, CONTEXT, device, options))
            for options in (DeviceOptions(chunk=CHUNK), keeping)
        )
        assert kept - plain == cuda_buffers.kept_state_bytes(head.sizes)
        target = on_device(spec, weights, "cpu", keeping)
        table = None if head.own_embedding else target.table
        shared = target.as_target(table, None if head.own_output else target.output)
        options = DeviceOptions(chunk=CHUNK, target=shared)
        parts = count_parts(head.spec, head.weights, CONTEXT, device, options)
        target.close()
    (layer,), sizes = head.sizes.layers, head.sizes
    assert layer.divisible is not None
    blocks = sum(block.undivided_device_bytes() for block in layer.undivided) + divisible_bytes(layer)
    blocks += cuda_matrices.vector_bytes(layer.divisible.undivided_vectors())
    states = sum(block.state_device_bytes(CONTEXT, "f16") for block in sizes.blocks)
    workspace = cuda_buffers.workspace_bytes(sizes, CONTEXT, CHUNK) + sizes.rope_device_bytes(CONTEXT)
    counted = blocks + states + workspace + sizes.head_device_bytes()
    if head.own_embedding:
        assert sizes.embedding is not None
        counted += cuda_matrices.matrix_bytes(sizes.embedding)
    assert 0 <= counted - sum(part.nbytes for part in parts) <= most_over(layer)
