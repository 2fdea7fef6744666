"""Draft heads on a GPU against the numpy formula: a target's states, pairs of a text, and whole drafts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from edgeinfer.model_config.layers.draft_head import read_draft_head
from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer_kernels.caches.layer_cache import pool_positions
from edgeinfer_kernels.cuda import device_parts
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.decode.device_logits import DeviceRows
from edgeinfer_kernels.cuda.device_parts import DeviceOptions, count_parts
from edgeinfer_kernels.cuda.draft.head_backend import HeadBackend
from edgeinfer_kernels.cuda.draft.target import first_rows
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.draft_loop import DraftRequest, DraftSampling
from edgeinfer_kernels.reference import ReferenceBackend
from edgeinfer_kernels.sizes import cuda_buffers, cuda_matrices
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_quant_formats import GGUFFile
from tests.edgeinfer.speculation.heads.random_heads import nemotron_head
from tests.kernels.cuda.conftest import HAS_GPU
from tests.kernels.cuda.decoders import SMALL
from tests.kernels.cuda.test_device_sizes import divisible_bytes, most_over
from tests.model_zoo import ZOO
from tests.random_models import RandomModel

CONTEXT, CHUNK, PAIRS = 64, 24, 30
SLICE = 64
"""Logits of a slice, of which the output of each model then has several."""
LAYER = RandomModel("arcee", layers=1, draft_head=True, formats=("Q8_0",))
MODELS = {
    "arcee": LAYER,
    "F16": replace(LAYER, formats=("F16",)),
    "qwen35": replace(ZOO["qwen35-draft-head"], formats=("F16",)),
    "glm4moe": replace(ZOO["glm4moe"], formats=("F16",)),
    "nemotron_h_moe": replace(nemotron_head(), formats=("F16",), seed=0),
    "deepseek2": replace(ZOO["deepseek2"], draft_head=True, formats=("F16",)),
}
TUNING = None if HAS_GPU else SMALL
States = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Pair:
    """A target and its draft head, each on the device and as the formula."""

    target: CudaBackend
    head: HeadBackend
    exact_target: ReferenceBackend
    exact_head: ReferenceBackend

    def exact_states(self, ids: list[int]) -> States:
        """The formula's states of a text after the final norm."""
        x = self.exact_target.embed(ids)
        self.exact_target.forward(x, 0)
        return np.asarray(self.exact_target.final_norm(x), np.float64)

    def exact_logits(self, ids: list[int], states: States, start: int) -> tuple[States, States]:
        """The formula's logits after pairs, and the head's states after its norm."""
        self.exact_head.set_hidden(states, start)
        x = self.exact_head.embed(ids)
        self.exact_head.forward(x, start)
        return np.asarray(self.exact_head.logits(x)), np.asarray(self.exact_head.final_norm(x))


def on_device(spec: DecoderSpec, weights: DecoderWeights, device: str, options: DeviceOptions) -> CudaBackend:
    positions = pool_positions(CONTEXT, 1)
    return CudaBackend(spec, weights, positions, torch.device(device), options, tuning=TUNING)


def head_on_device(
    spec: DecoderSpec, weights: DecoderWeights, device: str, options: DeviceOptions
) -> HeadBackend:
    positions = pool_positions(CONTEXT, 1)
    return HeadBackend(spec, weights, positions, torch.device(device), options, tuning=TUNING)


def exact(spec: DecoderSpec, weights: DecoderWeights) -> ReferenceBackend:
    return ReferenceBackend(spec, weights, DecoderState.allocate(spec, CONTEXT, "f32"), np.float64)


@pytest.fixture
def pair(
    request: pytest.FixtureRequest, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pair]:
    monkeypatch.setattr(device_parts, "SLICE", SLICE)
    with GGUFFile.open(MODELS[request.param].write(tmp_path / "model.gguf")) as file:
        config = read_config(file)
        spec, weights = config.specification(), read_weights(file, config)
        head = read_draft_head(file, config, weights)
        options = DeviceOptions(chunk=CHUNK, kept_states=cuda_buffers.KEPT_STATES)
        target = on_device(spec, weights, device, options)
        own = DeviceOptions(chunk=CHUNK, target=target.as_target(target.table, target.output))
        on_it = head_on_device(head.spec, head.weights, device, own)
        yield Pair(target, on_it, exact(spec, weights), exact(head.spec, head.weights))
        on_it.close()
        target.close()


def text(pair: Pair, count: int) -> list[int]:
    ids = np.random.default_rng(5).integers(3, pair.target.spec.vocabulary_size, count)
    return [int(token) for token in ids]


def read(pair: Pair, ids: list[int], counts: tuple[int, ...]) -> None:
    """Process a text on the target."""
    at = 0
    for count in counts:
        x = pair.target.embed(ids[at : at + count])
        pair.target.forward(x, at)
        pair.target.logits(x[-1:])
        at += count


def logits_after(pair: Pair, ids: list[int], first: int, start: int) -> States:
    """The head's logits after pairs whose states are those at `first` of the target's text."""
    pair.head.set_hidden(DeviceRows(first, len(ids), False), start)
    x = pair.head.embed(ids)
    pair.head.forward(x, start)
    return np.asarray(pair.head.logits(x), np.float64)


def distance(actual: States, expected: States) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("pair", MODELS, indirect=True)
def test_pairs_of_a_text_equal_the_formula(pair: Pair) -> None:
    ids = text(pair, PAIRS + 1)
    states = pair.exact_states(ids[:-1])
    read(pair, ids[:-1], (CHUNK, 3, 1, 2))
    for first, last in ((0, 20), (20, 23), (23, PAIRS)):
        actual = logits_after(pair, ids[first + 1 : last + 1], first, first)
        expected, _ = pair.exact_logits(ids[first + 1 : last + 1], states[first:last], first)
        assert distance(actual, expected) < 0.05


@pytest.mark.parametrize("pair", ["arcee"], indirect=True)
def test_a_head_whose_text_begins_later_counts_its_positions_from_there(pair: Pair) -> None:
    ids = text(pair, PAIRS + 1)
    states = pair.exact_states(ids[:-1])
    read(pair, ids[:-1], (CHUNK, 6))
    actual = logits_after(pair, ids[10 : PAIRS + 1], 9, 0)
    expected, _ = pair.exact_logits(ids[10 : PAIRS + 1], states[9:PAIRS], 0)
    assert distance(actual, expected) < 0.05


@pytest.mark.slow
@pytest.mark.default_cases(2)
@pytest.mark.parametrize("given", [1, 10, 3, 4])
@pytest.mark.parametrize("pair", ["arcee", "F16"], indirect=True)
def test_a_whole_draft_continues_with_the_states_of_the_head(pair: Pair, given: int) -> None:
    ids = text(pair, 21)
    states = pair.exact_states(ids[:-1])
    read(pair, ids[:-1], (20,))
    done = 20 - given
    if done:
        logits_after(pair, ids[1 : done + 1], 0, 0)
        pair.exact_logits(ids[1 : done + 1], states[:done], 0)
    pair.head.set_hidden(DeviceRows(done, given, False), done)
    request = DraftRequest([0.0] * 5, [0.0] * 5, pair.head.spec.vocabulary_size, DraftSampling())
    drafted = pair.head.draft(ids[done + 1 :], done, request)
    assert len(drafted.ids) == len(drafted.probs) == 5
    logits, own = pair.exact_logits(ids[done + 1 :], states[done:], done)
    for index, (token, prob) in enumerate(zip(drafted.ids, drafted.probs, strict=True)):
        row = logits[-1]
        assert row[token] >= row.max() - 0.05 * np.abs(row).max()
        assert prob == pytest.approx(np.exp(row[token]) / np.exp(row).sum(), rel=0.1)
        logits, own = pair.exact_logits([token], own[-1:], 20 + index)


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["arcee"], indirect=True)
def test_a_draft_ends_where_its_tokens_are_too_improbable(pair: Pair) -> None:
    ids = text(pair, 9)
    read(pair, ids[:-1], (8,))
    size = pair.head.spec.vocabulary_size

    def drafted(least: list[float], to_continue: list[float], limit: int) -> list[int]:
        pair.head.set_hidden(DeviceRows(0, 8, False), 0)
        draft = pair.head.draft(ids[1:], 0, DraftRequest(least, to_continue, limit, DraftSampling()))
        assert draft.made == 4
        return draft.ids

    whole = drafted([0.0] * 4, [], size)
    assert len(whole) == 4
    assert drafted([0.0, 1.0, 0.0, 0.0], [], size) == whole[:1]
    # All four have been made: stopping after two would save nothing.
    assert drafted([0.0] * 4, [0.0, 1.0, 0.0, 0.0], size) == whole
    assert drafted([0.0] * 4, [], whole[0]) == []


TREE = (-1, -1, 1, 0, 2)
"""The parents of the tokens of a draft tree."""


def likely(logits: States, power: float) -> dict[int, float]:
    """The softmax of a row of logits times `power`, by token."""
    weights = np.exp(power * (logits - logits.max()))
    return dict(enumerate((weights / weights.sum()).tolist()))


def agrees(found: list[tuple[int, float]], logits: States, power: float) -> bool:
    """Whether candidates are the most probable tokens of a row of the formula's, within rounding."""
    expected = likely(logits, power)
    best = sorted(expected.values(), reverse=True)[: len(found)]
    probs = [prob for _, prob in found]
    assert probs == sorted(probs, reverse=True)
    assert len({token for token, _ in found}) == len(found)
    return probs == pytest.approx(best, rel=0.1) and probs == pytest.approx(
        [expected[token] for token, _ in found], rel=0.1
    )


@pytest.mark.slow
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("given", [4, 5])
@pytest.mark.parametrize("pair", ["arcee", "glm4moe", "deepseek2"], indirect=True)
def test_a_tree_continues_with_the_states_of_each_path(pair: Pair, given: int) -> None:
    ids = text(pair, 21 + len(TREE))
    ids, nodes = ids[:21], ids[21:]
    states = pair.exact_states(ids[:-1])
    read(pair, ids[:-1], (20,))
    done, power = 20 - given, 0.8
    logits_after(pair, ids[1 : done + 1], 0, 0)
    pair.exact_logits(ids[1 : done + 1], states[:done], 0)
    pair.head.set_hidden(DeviceRows(done, given, False), done)
    (root,) = pair.head.draft_level(ids[done + 1 :], done, (), 5, power)
    logits, own = pair.exact_logits(ids[done + 1 :], states[done:], done)
    assert agrees(root, logits[-1], power)
    pair.head.draft_level(nodes[:2], 20, TREE[:2], 5, power)
    pair.head.draft_level(nodes[:4], 20, TREE[:4], 5, power)
    found = pair.head.draft_level(nodes, 20, TREE, 5, power)
    assert [len(each) for each in found] == 5 * [5]
    for path in ([0, 3], [1, 2, 4]):
        state = own[-1:]
        for depth, node in enumerate(path):
            logits, state = pair.exact_logits([nodes[node]], state, 20 + depth)
            assert agrees(found[node], logits[0], power)


@pytest.mark.parametrize("pair", ["arcee"], indirect=True)
def test_all_drafts_that_a_completion_can_have_are_captured_on_loading(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captures are counted here, and launched instead."""
    head, kinds = pair.head, list[tuple[str | int, ...]]()

    def prepare(kind: tuple[str | int, ...], launch: Callable[[], None], changed: object = None) -> None:
        kinds.append(kind)
        launch()

    monkeypatch.setattr(head.drafts.captured, "prepare", prepare)
    ids = text(pair, 21)
    read(pair, ids[:-1], (20,))
    request = DraftRequest([0.0] * 3, [0.0] * 3, pair.head.spec.vocabulary_size, DraftSampling())
    head.steps.use_widths((1, 2, 4))
    head.warm_up_drafts(trees=True)
    expected: set[tuple[str | int, ...]] = {(kind, width) for kind in ("first", "root") for width in (1, 2)}
    expected |= {("next", 1, 2)}
    expected |= {("padded", 4), ("root, padded", 4), *(("further", count) for count in range(1, 7))}
    expected |= {("level", width) for width in (1, 2, 4)}
    assert sorted(kinds) == sorted(expected)
    head.set_hidden(DeviceRows(0, 4, False), 0)
    assert len(head.draft(ids[1:5], 0, request).ids) == 3
    kinds.clear()
    head.warm_up_drafts(trees=False)
    assert {kind for kind, *_ in kinds} == {"first", "padded", "next", "further"}


@pytest.mark.parametrize("name", MODELS)
def test_the_counted_bytes_of_a_head_are_those_that_it_allocates(name: str, tmp_path: Path) -> None:
    device = torch.device("cpu")
    with GGUFFile.open(MODELS[name].write(tmp_path / "model.gguf")) as file:
        config = read_config(file)
        spec, weights = config.specification(), read_weights(file, config)
        head = read_draft_head(file, config, weights)
        plain, keeping = (
            sum(part.nbytes for part in count_parts(spec, weights, CONTEXT, device, options))
            for options in (DeviceOptions(), DeviceOptions(kept_states=cuda_buffers.KEPT_STATES))
        )
        assert keeping - plain == cuda_buffers.kept_state_bytes(head.sizes)
        target = on_device(spec, weights, "cpu", DeviceOptions(chunk=CHUNK, kept_states=1024))
        options = DeviceOptions(chunk=CHUNK, target=target.as_target(target.table, target.output))
        parts = count_parts(head.spec, head.weights, CONTEXT, device, options)
        target.close()
    sizes: ModelSizes = head.sizes
    (layer,) = sizes.layers
    divisible = layer.divisible
    assert divisible is not None
    blocks = sum(block.undivided_device_bytes() for block in layer.undivided) + divisible_bytes(layer)
    blocks += cuda_matrices.vector_bytes(divisible.undivided_vectors())
    states = sum(block.state_device_bytes(CONTEXT, "f16") for block in sizes.blocks)
    workspace = cuda_buffers.workspace_bytes(sizes, CONTEXT, CHUNK) + sizes.rope_device_bytes(CONTEXT)
    counted = blocks + states + workspace + sizes.head_device_bytes()
    assert 0 <= counted - sum(part.nbytes for part in parts) <= most_over(layer)


def test_first_rows_of_a_matrix_are_whole_groups(device: str, tmp_path: Path) -> None:
    with GGUFFile.open(LAYER.write(tmp_path / "model.gguf")) as file:
        config = read_config(file)
        options = DeviceOptions(chunk=CHUNK, kept_states=1024)
        target = on_device(config.specification(), read_weights(file, config), device, options)
        output = target.as_target(None, target.output).output
        assert output is not None
        assert first_rows(output, 48).words.shape[0] == 48
        with pytest.raises(ValueError, match="saw 50"):
            first_rows(output, 50)
        target.close()
