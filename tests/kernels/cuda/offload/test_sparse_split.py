"""A split model with a sparse CPU shard: steps, and prompts that stream weights stored by neuron."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer_kernels.blocks.moe import MoeSpec
from edgeinfer_kernels.cpu.backend import CpuBackend, CpuOptions
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.compiler.kernel_units import SERVICE, kernel_units
from edgeinfer_kernels.cpu.sparse import SparseLayers, dense_layer, why_dense
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.neuron_predictor import NeuronPredictor
from harness.hot_neurons.comparison import seconds_alone
from tests.kernels.conftest import BEST, built_kernels
from tests.kernels.cuda.decoders import Decoder, opened, worst
from tests.kernels.cuda.offload.test_split_backend import TOLERANCE, read_split
from tests.kernels.cuda.split_decoders import CPU_ONLY, device_layer, split_decoder
from tests.kernels.row_matrices import random_matrix
from tests.kernels.split_layers import LayerSplit
from tests.model_zoo import ZOO

ROOT = Path(__file__).resolve().parents[4]
RELU, DRELU = {"hidden_activation": "relu"}, {"hidden_activation": "drelu"}
MODELS = {
    "arcee": replace(ZOO["arcee"], width=256, feed_forward=1024, layers=3),
    "llama": replace(ZOO["llama"], width=256, feed_forward=1024, layers=3, extra=RELU),
    "llama-drelu": replace(ZOO["llama"], width=256, feed_forward=1024, layers=3, extra=DRELU),
}


def predictors(decoder: Decoder) -> SparseLayers:
    """Predictors that select every neuron."""
    found: dict[int, NeuronPredictor | None] = {}
    for layer in range(len(decoder.weights.layers)):
        neurons, width = dense_layer(decoder.weights, layer).ffn_up.rows, decoder.specification.hidden_size
        first, second = random_matrix("Q8_0", 32, width), random_matrix("Q8_0", neurons, 32)
        found[layer] = NeuronPredictor(first, second, np.full(neurons, 1e6, np.float32))
    return found


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("predicted", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.default_cases(1)
def test_steps_and_streamed_prompts_equal_the_unsplit_logits(
    device: str, tmp_path: Path, name: str, predicted: bool, kind: str
) -> None:
    with opened(replace(MODELS[name], formats=(kind,)), tmp_path) as decoder:
        layers = range(len(decoder.weights.layers))
        assert [why_dense(decoder.specification, decoder.weights, layer) for layer in layers] == [None] * 3
        splits = [LayerSplit(True, neurons=512), CPU_ONLY, device_layer(decoder, 2)]
        sparse = predictors(decoder) if predicted else dict.fromkeys(layers)
        units = kernel_units(decoder.weights, head=False, sparse=sparse)
        kernels = built_kernels(BEST, [SERVICE, *units])
        ids = decoder.ids(20)
        with split_decoder(decoder, device, splits, kernels, stream_min_tokens=6, sparse=sparse) as backend:
            result = read_split(backend, ids, (10, 1, 6, 2, 1))
        assert worst(result, decoder.reference_logits(ids)) < TOLERANCE


EXPERT_MODELS = {
    "smallthinker": replace(ZOO["smallthinker"], width=256, expert_length=256, layers=3),
    "nemotron_h_moe": replace(ZOO["nemotron_h_moe"], width=256, expert_length=256),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K"])
@pytest.mark.parametrize("name", EXPERT_MODELS)
@pytest.mark.default_cases(1)
def test_steps_and_streamed_prompts_of_sparse_experts_equal_the_unsplit_logits(
    device: str, tmp_path: Path, name: str, kind: str
) -> None:
    with opened(replace(EXPERT_MODELS[name], formats=(kind,)), tmp_path) as decoder:
        spec, weights = decoder.specification, decoder.weights
        splits = [LayerSplit(True, experts=(1, 4, 6)), LayerSplit(True, experts=(0,)), LayerSplit(True)]
        if name == "nemotron_h_moe":
            splits = [device_layer(decoder, 0), splits[0], device_layer(decoder, 2), splits[2]]
        experts = [layer for layer in range(len(splits)) if has_experts(decoder, layer)]
        assert [why_dense(spec, weights, layer) for layer in experts] == [None] * len(experts)
        sparse: SparseLayers = dict.fromkeys(experts)
        units = kernel_units(weights, head=False, sparse=sparse)
        kernels = built_kernels(BEST, [SERVICE, *units])
        ids = decoder.ids(20)
        with split_decoder(decoder, device, splits, kernels, stream_min_tokens=6, sparse=sparse) as backend:
            result = read_split(backend, ids, (10, 1, 6, 2, 1))
        assert worst(result, decoder.reference_logits(ids)) < TOLERANCE


def has_experts(decoder: Decoder, layer: int) -> bool:
    """Whether a layer has experts."""
    return any(isinstance(each.block, MoeSpec) for each in decoder.specification.layers[layer].blocks)


def test_streamed_prompts_report_which_neurons_are_active(device: str, tmp_path: Path) -> None:
    with opened(replace(MODELS["arcee"], formats=("Q8_0",)), tmp_path) as decoder:
        splits = [LayerSplit(True, neurons=512), CPU_ONLY, device_layer(decoder, 2)]
        kernels = built_kernels(BEST, [SERVICE, *kernel_units(decoder.weights)])
        ids, seen = decoder.ids(40), dict[int, list[np.ndarray]]()
        with split_decoder(decoder, device, splits, kernels, stream_min_tokens=6) as backend:
            backend.gpu_shard.observe(lambda layer, rows, _: seen.setdefault(layer, []).append(rows.copy()))
            read_split(backend, ids, (1, 4, 12, 11))
        hidden = here_hidden(decoder, kernels, ids[:17])
    assert {layer: [rows.shape for rows in found] for layer, found in seen.items()} == {
        layer: [(12, 1024)] for layer in range(3)
    }
    for layer, found in seen.items():
        assert np.mean((found[0] != 0) == (hidden[layer][5:] != 0)) > 0.97


def here_hidden(decoder: Decoder, kernels: Kernels, ids: list[int]) -> dict[int, np.ndarray]:
    """The hidden rows of every layer on the CPU."""
    state = DecoderState.allocate(decoder.specification, 64, "f32")
    backend = CpuBackend(decoder.specification, decoder.weights, state, kernels, CpuOptions(32, 1))
    seen = {}
    backend.on_hidden = lambda layer, rows, _: seen.update({layer: rows.copy()})
    backend.forward(backend.embed(ids), 0)
    backend.close()
    return seen


@pytest.mark.slow
def test_each_part_of_a_token_can_be_timed_alone(device: str, tmp_path: Path) -> None:
    with opened(replace(MODELS["arcee"], formats=("Q8_0",)), tmp_path) as decoder:
        splits = [LayerSplit(True, neurons=512), CPU_ONLY, device_layer(decoder, 2)]
        sparse: SparseLayers = dict.fromkeys(range(3))
        units = kernel_units(decoder.weights, head=False, sparse=sparse)
        kernels, ids = built_kernels(BEST, [SERVICE, *units]), decoder.ids(3)
        with split_decoder(decoder, device, splits, kernels, sparse=sparse) as backend:
            expected = read_split(backend, ids, (1, 1, 1))
            assert min(seconds_alone(backend)) > 0
            again = read_split(backend, ids, (1, 1, 1))
    assert all(np.array_equal(again[at], row) for at, row in expected.items())


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from edgeinfer_kernels.cuda.triton_ops import neuron_unpacking as module

OFFSETS = module.ColumnOffsets(4096, 2048, 0, 65536, 8192, 73728, 1)
for capability in (80, 90, 120):
    target = GPUTarget("cuda", capability, 32)
    for name in ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"):
        signature = {"raw": "*u8", "out": "*fp16"}
        rows = {"COLUMNS": 4096, "BLOCK_BYTES": 18, "FORMAT": name}
        columns = {"OFFSETS": OFFSETS, "BITS": 4 if name in ("Q4_0", "Q4_K") else 8, "FORMAT": name}
        for kernel, constants in (
            (module.unpack_neuron_rows_kernel, rows),
            (module.unpack_neuron_columns_kernel, columns | {"EXPERT": 0}),
            (module.unpack_neuron_columns_kernel, columns | {"EXPERT": 768}),
        ):
            kinds = signature | dict.fromkeys(constants, "constexpr")
            assert triton.compile(ASTSource(kernel, kinds, constants), target=target).asm["ptx"]
print("compiled")
"""


@pytest.mark.slow
def test_the_kernels_compile_for_every_generation_of_gpus() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]
