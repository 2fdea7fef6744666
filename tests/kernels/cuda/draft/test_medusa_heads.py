"""Medusa heads on a GPU: candidates against the numpy formula, their bytes, and completions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import edgeinfer
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.drafter import DraftRequest
from edgeinfer.speculation.heads.device_medusa import DeviceMedusa
from edgeinfer_kernels.cuda.decode.device_logits import DeviceRows
from edgeinfer_kernels.cuda.draft.medusa_backend import MedusaBackend
from edgeinfer_kernels.cuda.draft.target import HeadTarget
from edgeinfer_kernels.cuda.tuning.step_shapes import usual_tuning
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.reference import ReferenceBackend
from edgeinfer_kernels.sizes import cuda_buffers
from edgeinfer_kernels.sizes.cuda_matrices import matrix_bytes
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from tests.edgeinfer.speculation.test_drafting import always_draft
from tests.edgeinfer.speculation.test_tree import always_tree
from tests.kernels.cuda.conftest import HAS_GPU
from tests.kernels.cuda.decoders import SMALL
from tests.kernels.cuda.draft.test_draft_head_steps import agrees
from tests.kernels.cuda.draft.test_head_loading import GPU, GREEDY, IDS, drafter_of
from tests.kernels.cuda.draft.test_head_loading import unmeasured as unmeasured
from tests.kernels.cuda.offload.conftest import small_gpu as small_gpu
from tests.kernels.heads.test_medusa_head import random_heads
from tests.random_models import RandomModel

WIDTH, ROWS, HEADS, RING, CONTEXT = 64, 99, 3, 16, 64
TARGET = RandomModel("llama", layers=2, formats=("Q8_0",))


@pytest.mark.parametrize("name", ["F16", "Q8_0"])
def test_the_candidates_of_each_head_are_those_of_the_formula(name: str, device: str) -> None:
    random, power = np.random.default_rng(3), 0.3
    spec, weights = random_heads(random, name, WIDTH, ROWS, HEADS)
    states = random.standard_normal((RING, WIDTH)).astype(np.float32) / 8
    target = HeadTarget(None, None, torch.from_numpy(states).to(device))
    tuning = usual_tuning(90) if HAS_GPU else SMALL
    kernel = MedusaBackend(spec, weights, CONTEXT, torch.device(device), target, tuning)
    formula = ReferenceBackend(spec, weights, DecoderState.allocate(spec, CONTEXT, "f32"), np.float64)
    for position, heads in ((5, HEADS), (RING + 2, 1), (2 * RING - 1, 2)):
        found = kernel.candidates(DeviceRows(position, 1, False), heads, 5, power)
        assert len(found) == heads
        for head, best in enumerate(found):
            row = position % RING
            assert agrees(best, formula.medusa_logits(states[row : row + 1], head)[0], power)
    kernel.close()


@pytest.mark.parametrize("name", ["F16", "Q8_0"])
def test_the_counted_bytes_of_heads_are_those_that_they_allocate(name: str) -> None:
    spec, weights = random_heads(np.random.default_rng(3), name, WIDTH, ROWS, HEADS)
    sizes = ModelSizes.of(spec, weights)
    target = HeadTarget(None, None, torch.zeros(RING, WIDTH))
    loaded = MedusaBackend(spec, weights, CONTEXT, torch.device("cpu"), target, usual_tuning(90))
    counted = sum(block.undivided_device_bytes() for block in sizes.blocks) + sizes.head_device_bytes()
    assert sizes.embedding is not None
    counted += matrix_bytes(sizes.embedding) + cuda_buffers.workspace_bytes(sizes, CONTEXT)
    assert counted == loaded.nbytes
    loaded.close()


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    pytest.importorskip("safetensors")
    from tests.edgeinfer.speculation.heads.test_medusa import folder_of, weights

    return folder_of(tmp_path / "heads", weights())


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
def test_completions_equal_baseline_decoding(tmp_path: Path, heads: Path) -> None:
    path = TARGET.write(tmp_path / "model.gguf")
    with edgeinfer.load(path, draft=heads, draft_tree_width=2, **GPU) as model:
        drafter = drafter_of(model)
        assert isinstance(drafter, DeviceMedusa)
        assert model.plan is not None
        planned = {(item.item, item.device): item.bytes for item in model.plan.items}
        assert planned["draft head", "gpu"] == drafter.nbytes
        speculator, model.speculator = model.speculator, None
        expected = model.generate(IDS, **GREEDY).ids
        model.speculator = speculator
        for nodes in (0, 9):
            if nodes:
                always_tree(model, 3, nodes)
            else:
                always_draft(model, 3)
            model.engine.rewind(0)
            completion = model.generate(IDS, **GREEDY)
            assert completion.ids == expected
            assert completion.speed.accepted_share is not None


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
def test_drafts_are_those_of_the_cpu(tmp_path: Path, heads: Path) -> None:
    path, drafts = TARGET.write(tmp_path / "model.gguf"), list[Any]()
    for device in ("cpu", "cuda"):
        with edgeinfer.load(path, draft=heads, draft_tree_width=2, **{**GPU, "device": device}) as model:
            model.engine.append(IDS[:-1])
            for nodes in (0, 7):
                request = DraftRequest(3, SamplingParams(temperature=0.0), max_nodes=nodes)
                drafts.append(drafter_of(model).propose(IDS, request))
    for cpu, gpu in zip(drafts[:2], drafts[2:], strict=True):
        assert sorted(cpu.ids) == sorted(gpu.ids)
        assert cpu.chain.ids == gpu.chain.ids
        assert sorted(cpu.probs) == pytest.approx(sorted(gpu.probs), rel=0.2)
