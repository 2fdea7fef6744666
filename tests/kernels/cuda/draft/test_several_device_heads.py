"""Several draft heads of one file (Step 3.5, MiMo-V2) on a GPU: against the numpy formula, and loaded."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import edgeinfer
from edgeinfer.model_config.layers.draft_head import read_draft_head
from edgeinfer.model_config.weights import read_config, read_weights, rope_factors
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.drafter import DraftRequest
from edgeinfer.speculation.heads.device_head import DeviceHead
from edgeinfer_kernels import draft_loop
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.decode.device_logits import DeviceRows
from edgeinfer_kernels.cuda.device_parts import DeviceOptions
from edgeinfer_kernels.cuda.draft.head_backend import FirstHead
from edgeinfer_kernels.reference import ReferenceBackend
from edgeinfer_kernels.sizes.cuda_buffers import KEPT_STATES
from edgeinfer_quant_formats import GGUFFile
from tests.edgeinfer.speculation.heads.random_heads import HEADS, HEADS_OF, LAYERS, ModelWithHeads
from tests.edgeinfer.speculation.test_drafting import always_draft
from tests.kernels.cuda.draft.test_draft_head_steps import CHUNK, exact, head_on_device, on_device
from tests.kernels.cuda.draft.test_head_loading import GPU, GREEDY, IDS, drafter_of
from tests.kernels.cuda.draft.test_head_loading import unmeasured as unmeasured
from tests.kernels.cuda.draft.test_split_heads import Splitting
from tests.kernels.cuda.draft.test_split_heads import split as split
from tests.kernels.cuda.offload.conftest import small_gpu as small_gpu

TEXT = 30
"""Tokens of a text, more than a chunk."""
States = npt.NDArray[np.float64]


def model_file(name: str, layers: int = LAYERS) -> ModelWithHeads:
    return replace(HEADS_OF[name](own_outputs=True, layers=layers), formats=("F16",))


@dataclass(frozen=True)
class Heads:
    """A target and its heads on the device, and all of them as the formula."""

    target: CudaBackend
    first: FirstHead
    exact_target: ReferenceBackend
    exact_heads: list[ReferenceBackend]

    def exact_drafts(self, ids: list[int], drafted: list[int]) -> Iterator[States]:
        """The formula's logits after a text, and after each of the drafted tokens that follow."""
        x = self.exact_target.embed(ids[:-1])
        self.exact_target.forward(x, 0)
        states, tokens = list(x), ids[1:]
        for index, head in enumerate(self.exact_heads):
            head.set_hidden(np.array(states), 0)
            x = head.embed(tokens)
            head.forward(x, 0)
            yield np.asarray(head.logits(x)[-1], np.float64)
            states, tokens = [*states, x[-1]], [*tokens, drafted[index]]


@pytest.fixture(params=HEADS_OF)
def heads(request: pytest.FixtureRequest, device: str, tmp_path: Path) -> Iterator[Heads]:
    with GGUFFile.open(model_file(request.param).write(tmp_path / "model.gguf")) as file:
        config = read_config(file)
        factors = rope_factors(file, config, 64)
        spec, weights = config.specification(factors), read_weights(file, config)
        read = [read_draft_head(file, config, weights, factors, head=head) for head in range(HEADS)]
        kept = DeviceOptions(chunk=CHUNK, kept_states=KEPT_STATES, kept_layers=read[0].target_layers)
        target = on_device(spec, weights, device, kept)
        own = DeviceOptions(chunk=CHUNK, target=target.as_target(target.table, None))
        first = FirstHead(
            read[0].spec, read[0].weights, 64, torch.device(device), own, tuning=target.step.tuning
        )
        first.lead([head_on_device(head.spec, head.weights, device, own) for head in read[1:]])
        yield Heads(target, first, exact(spec, weights), [exact(head.spec, head.weights) for head in read])
        first.close()
        target.close()


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("pending", [1, 3, 9])
def test_each_head_drafts_from_the_states_of_those_before_it(heads: Heads, pending: int) -> None:
    ids = [int(token) for token in np.random.default_rng(3).integers(3, 96, TEXT)]
    at = 0
    for count in (CHUNK, TEXT - 1 - CHUNK):
        heads.target.forward(heads.target.embed(ids[at : at + count]), at)
        at += count
    done = TEXT - 1 - pending
    for first, last in ((0, CHUNK), (CHUNK, done)):
        if first < last:
            heads.first.set_hidden(DeviceRows(first, min(last, done) - first, False), first)
            part = ids[first + 1 : min(last, done) + 1]
            heads.first.forward(heads.first.embed(part), first)
    heads.first.set_hidden(DeviceRows(done, pending, False), done)
    size = heads.first.spec.vocabulary_size
    request = draft_loop.DraftRequest([0.0] * 5, [], size, draft_loop.DraftSampling())
    drafted = heads.first.draft(ids[done + 1 :], done, request)
    assert len(drafted.ids) == HEADS  # One token of each.
    exact_logits = heads.exact_drafts(ids, drafted.ids)
    for token, prob, row in zip(drafted.ids, drafted.probs, exact_logits, strict=True):
        assert row[token] >= row.max() - 0.02 * np.abs(row).max()
        assert prob == pytest.approx(np.exp(row[token]) / np.exp(row).sum(), rel=0.05)


def drafts_after(model: edgeinfer.Model) -> list[Any]:
    """Drafts after a short text, and after one that is processed as a chunk."""
    drafts = []
    for ids in (IDS, [8, 8, 3] * 8 + IDS):
        model.engine.rewind(0)
        model.engine.append(ids[:-1])
        request = DraftRequest(7, SamplingParams(temperature=0.0))
        drafts.append(drafter_of(model).propose(ids, request))
    return drafts


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("name", ["mimo2", pytest.param("step35", marks=pytest.mark.every_case)])
def test_drafts_are_those_of_the_cpu_and_completions_those_without(tmp_path: Path, name: str) -> None:
    path = model_file(name).write(tmp_path / "model.gguf")
    with edgeinfer.load(path, draft="mtp", **{**GPU, "device": "cpu"}) as plain:
        expected = drafts_after(plain)
    with edgeinfer.load(path, draft="mtp", **GPU) as model:
        drafter = drafter_of(model)
        assert isinstance(drafter, DeviceHead)
        assert model.plan is not None
        planned = {(item.item, item.device): item.bytes for item in model.plan.items}
        assert planned["draft head", "gpu"] == drafter.nbytes
        for found, wanted in zip(drafts_after(model), expected, strict=True):
            assert found.ids == wanted.ids
            assert found.probs == pytest.approx(wanted.probs, rel=0.1)
        check_completion(model)


def check_completion(model: edgeinfer.Model) -> None:
    """It is that without drafts."""
    speculator, model.speculator = model.speculator, None
    model.engine.rewind(0)
    expected = model.generate(IDS, **GREEDY).ids
    model.speculator = speculator
    always_draft(model, 3)
    model.engine.rewind(0)
    completion = model.generate(IDS, **GREEDY)
    assert completion.ids == expected
    assert completion.speed.accepted_share is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mimo2", pytest.param("step35", marks=pytest.mark.every_case)])
def test_the_heads_of_a_split_model_are_on_the_gpu(tmp_path: Path, split: Splitting, name: str) -> None:
    path = model_file(name, layers=14).write(tmp_path / "model.gguf")
    with split(path, "mtp") as model:
        drafter = drafter_of(model)
        assert isinstance(drafter, DeviceHead), model.warnings
        assert model.plan is not None
        assert len(model.plan.devices) == 2
        planned = {(item.item, item.device): item.bytes for item in model.plan.items}
        assert planned["draft head", "gpu"] == drafter.nbytes
        found = drafts_after(model)
        check_completion(model)
    with edgeinfer.load(path, draft="mtp", **{**GPU, "device": "cpu"}) as plain:
        for own, wanted in zip(found, drafts_after(plain), strict=True):
            assert own.ids == wanted.ids
