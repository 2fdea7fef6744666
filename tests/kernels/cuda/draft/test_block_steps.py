"""Block drafters on a GPU against the numpy formula: keys of a target's states, and the blocks after them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from edgeinfer.model_config.layers.block_drafts import BlockDraftModel, read_block_drafts
from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.caches.layer_cache import pool_positions
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.decode.device_logits import DeviceRows
from edgeinfer_kernels.cuda.device_parts import DeviceOptions, count_parts
from edgeinfer_kernels.cuda.draft.block_backend import BlockBackend
from edgeinfer_kernels.reference import ReferenceBackend
from edgeinfer_kernels.sizes import cuda_buffers, cuda_matrices
from edgeinfer_quant_formats import GGUFFile
from tests.edgeinfer.speculation.heads.dflash.random_dflash import MASK, VARIANTS, RandomDFlash
from tests.kernels.cuda.conftest import HAS_GPU
from tests.kernels.cuda.decoders import SMALL
from tests.kernels.cuda.draft.test_draft_head_steps import CHUNK, CONTEXT, States, exact, on_device
from tests.kernels.cuda.test_device_sizes import divisible_bytes
from tests.random_models import RandomModel

TARGET = RandomModel("llama", layers=4, formats=("F16",))
DRAFTS = {
    **{name: VARIANTS[name] for name in ("plain", "causal", "windows", "ids", "gemma", "mimo", "sections")},
    "shared": RandomDFlash(),
    "Q8_0": RandomDFlash(format="Q8_0", own_tables=True, block_size=12),
}


@dataclass(frozen=True)
class Pair:
    """A target and its block drafter, each on the device and as the formula."""

    target: CudaBackend
    draft: BlockBackend
    model: BlockDraftModel
    exact_target: ReferenceBackend
    exact_draft: ReferenceBackend

    def states(self, ids: list[int]) -> States:
        """The formula's states of a text, side by side."""
        x = self.exact_target.embed(ids)
        self.exact_target.forward(x, 0)
        return np.concatenate(self.exact_target.kept_hidden(len(ids)), axis=1)

    def read(self, ids: list[int], counts: tuple[int, ...]) -> None:
        """Process a text on the target."""
        at = 0
        for count in counts:
            self.target.forward(self.target.embed(ids[at : at + count]), at)
            at += count

    def append(self, first: int, last: int) -> None:
        """Write the keys and values of the target's states."""
        self.draft.set_hidden(DeviceRows(first, last - first, False), first)
        self.draft.forward_layers(self.draft.embed([MASK] * (last - first)), first, [0])

    def probabilities(self, states: States, ids: list[int]) -> States:
        """The formula's softmax of each row of a block after the states, by token id."""
        self.exact_draft.set_hidden(states, 0)
        self.exact_draft.forward_layers(self.exact_draft.embed([0] * len(states)), 0, [0])
        x = self.exact_draft.embed(ids)
        self.exact_draft.forward_layers(x, len(states), range(1, len(self.model.spec.layers)))
        logits = np.asarray(self.exact_draft.logits(x), np.float64)
        found = np.exp(logits - logits.max(axis=1, keepdims=True))
        found /= found.sum(axis=1, keepdims=True)
        whole, rows = np.zeros((len(ids), TARGET.vocabulary)), self.model.weights.output_ids
        whole[:, slice(None, found.shape[1]) if rows is None else rows] = found
        return whole


def pair_of(made: RandomDFlash, device: str, folder: Path, kv: CacheType = "f16") -> Pair:
    file = GGUFFile.open(TARGET.write(folder / "model.gguf"))
    own = GGUFFile.open(made.write(folder / "draft.gguf"))
    config = read_config(file)
    spec, weights = config.specification(), read_weights(file, config)
    model = read_block_drafts(own, config, weights)
    keeping = DeviceOptions(
        chunk=CHUNK, kept_states=cuda_buffers.KEPT_STATES, kept_layers=model.target_layers
    )
    target = on_device(spec, weights, device, keeping)
    shared = target.as_target(
        None if model.own_embedding else target.table, None if model.own_output else target.output
    )
    draft = BlockBackend(
        model.spec, model.weights, pool_positions(CONTEXT, 1), torch.device(device),
        DeviceOptions(kv=kv, chunk=CHUNK, target=shared), tuning=None if HAS_GPU else SMALL,
    )  # fmt: skip
    reference = exact(spec, weights)
    reference.keep_hidden(model.target_layers)
    state = model.allocate_state(CONTEXT, "f32")
    formula = ReferenceBackend(model.spec, model.weights, state, np.float64)
    return Pair(target, draft, model, reference, formula)


@pytest.fixture
def pair(request: pytest.FixtureRequest, device: str, tmp_path: Path) -> Iterator[Pair]:
    pair = pair_of(DRAFTS[request.param], device, tmp_path)
    yield pair
    pair.draft.close()
    pair.target.close()


def check_block(pair: Pair, ids: list[int], count: int, near: float = 0.1) -> None:
    """The candidates of a block after a text are those of the formula."""
    block = [ids[-1], *[MASK] * (count - 1)]
    expected = pair.probabilities(pair.states(ids[:-1]), block)
    found = pair.draft.candidates(block, len(ids) - 1, 3, 1.0)
    assert len(found) == count
    for row, candidates in zip(expected, found, strict=True):
        for token, prob in candidates:
            assert prob == pytest.approx(row[token], rel=near, abs=1e-3)
        assert candidates[0][1] >= (1 - near) * row.max()


def text(count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(5).integers(5, TARGET.vocabulary, count)]


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("pair", DRAFTS, indirect=True)
def test_blocks_after_a_text_equal_the_formula(pair: Pair) -> None:
    ids = text(31)
    pair.read(ids, (CHUNK, 3, 1, 2))
    for first, last in ((0, 20), (20, 21), (21, 24), (24, 30)):
        pair.append(first, last)
        if last in (20, 30):
            check_block(pair, ids[: last + 1], 5 if last == 20 else min(pair.model.block_size, 12))


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["plain"], indirect=True)
def test_the_keys_of_a_block_are_replaced_by_those_of_its_tokens(pair: Pair) -> None:
    ids = text(31)
    pair.read(ids, (CHUNK, 6))
    pair.append(0, 10)
    check_block(pair, ids[:11], 8)
    pair.append(10, 13)
    check_block(pair, ids[:14], 3)
    pair.append(13, 30)
    check_block(pair, ids, 4)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("kv", ["q8_0", "q4_0+f16", "fp8", "q4_0"])
def test_caches_of_other_types_hold_the_keys(kv: CacheType, device: str, tmp_path: Path) -> None:
    pair, ids = pair_of(DRAFTS["windows"], device, tmp_path, kv), text(31)
    pair.read(ids, (CHUNK, 6))
    pair.append(0, 22)
    pair.append(22, 30)
    block = [ids[-1], *[MASK] * 4]
    expected = pair.probabilities(pair.states(ids[:-1]), block)
    found = pair.draft.candidates(block, 30, 1, 1.0)
    # Rounded keys may give another token, of nearly the same probability.
    near = 0.15 if kv in ("q8_0", "fp8") else 0.5
    for row, ((token, _),) in zip(expected, found, strict=True):
        assert row[token] >= (1 - near) * row.max()
    pair.draft.close()
    pair.target.close()


@pytest.mark.default_cases(6)
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("name", DRAFTS)
def test_the_counted_bytes_are_those_that_are_allocated(name: str, kind: CacheType, tmp_path: Path) -> None:
    pair = pair_of(DRAFTS[name], "cpu", tmp_path, kind)
    model, sizes = pair.model, pair.model.sizes
    context = pool_positions(CONTEXT, 1)
    blocks = [block.undivided_device_bytes() for layer in sizes.layers for block in layer.undivided] + [
        divisible_bytes(layer) for layer in sizes.layers
    ]
    vectors = [layer.divisible.undivided_vectors() for layer in sizes.layers if layer.divisible]
    states = sum(block.state_device_bytes(context, kind) for block in sizes.blocks)
    workspace = cuda_buffers.workspace_bytes(sizes, context, CHUNK, kind) + sizes.rope_device_bytes(context)
    counted = sum(blocks) + states + workspace + sizes.head_device_bytes()
    counted += sum(map(cuda_matrices.vector_bytes, vectors))
    if model.own_embedding:
        assert sizes.embedding is not None
        counted += cuda_matrices.matrix_bytes(sizes.embedding)
    assert counted == pair.draft.nbytes
    spec, weights = pair.exact_target.spec, pair.exact_target.weights
    plain, kept = (
        sum(part.nbytes for part in count_parts(spec, weights, CONTEXT, torch.device("cpu"), options))
        for options in (
            DeviceOptions(chunk=CHUNK),
            DeviceOptions(chunk=CHUNK, kept_states=cuda_buffers.KEPT_STATES, kept_layers=model.target_layers),
        )
    )
    assert kept - plain == cuda_buffers.kept_state_bytes(sizes)
    pair.draft.close()
    pair.target.close()


def test_other_layers_run_only_in_blocks(device: str, tmp_path: Path) -> None:
    pair = pair_of(replace(DRAFTS["plain"], layers=1), device, tmp_path)
    with pytest.raises(ValueError, match=r"saw the layers \(1,\), wanted layer 0"):
        pair.draft.forward_layers(pair.draft.embed([MASK]), 0, [1])
    pair.draft.close()
    pair.target.close()
