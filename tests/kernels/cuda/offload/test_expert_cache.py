"""The expert cache changes experts while a split MoE model decodes; the logits stay the same."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from edgeinfer_kernels.blocks.moe import MoeSpec, MoeWeights
from edgeinfer_kernels.cpu.backend import CpuBackend, CpuOptions
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.layout.packed_matrix import interleave
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.offload import expert_loading
from edgeinfer_kernels.cuda.offload.expert_loading import rows_of_groups
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.decoder_state import DecoderState, Routing
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_offload.runtime.expert_cache_policy import ExpertCachePolicy, Swap
from tests.kernels.cuda.conftest import HAS_GPU
from tests.kernels.cuda.decoders import CONTEXT, Decoder, opened, worst
from tests.kernels.cuda.device_matrices import random_bits
from tests.kernels.cuda.offload.test_split_backend import TOLERANCE, on_a_gpu, read_split
from tests.kernels.cuda.split_decoders import split_decoder
from tests.kernels.split_layers import LayerSplit
from tests.model_zoo import ZOO

LAYERS = () if HAS_GPU else (0, 1)
"""Interpreted kernels only: two MoE models change their experts in turn as three to five do."""


class AlwaysChangingPolicy(ExpertCachePolicy):
    """Always requests the expert with the lowest number that has no slot, in each layer in turn."""

    layer_turn = 0
    counted: npt.NDArray[np.int64]

    def __init__(self, count: int, used: int, residents: Sequence[Sequence[int]]) -> None:
        super().__init__(count, used, residents)
        self.check_interval = 1

    def record(self, requests: npt.NDArray[np.int64]) -> None:
        before = getattr(self, "noted", np.zeros_like(requests))
        self.counted = before + requests
        super().record(requests)

    def proposals(self) -> list[Swap]:
        self.layer_turn += 1
        self.check_interval = 1
        row = self.layer_turn % len(self.slots)
        evicted = int(np.argmax(self.slots[row]))
        expert = int(np.argmin(np.where(np.arange(self.slots.shape[1]) > evicted, self.slots[row], 9)))
        if self.slots[row, expert] >= 0:
            expert = int(np.argmin(self.slots[row]))
        return [Swap(row, expert, int(self.slots[row, evicted]), evicted, 1.0)]


def cached_splits(decoder: Decoder) -> list[LayerSplit]:
    """A third of the experts of every layer on the device, all of them on the host."""
    result = []
    for index, layer in enumerate(decoder.weights.layers):
        count = layer.block_of(MoeWeights).ffn_up_exps.experts
        result.append(LayerSplit(True, experts=tuple(range(index % 2, count, 3)), has_expert_cache=True))
    return result


def experts_of(splits: Sequence[LayerSplit]) -> list[tuple[int, ...]]:
    return [split.experts for split in splits]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stream_min_tokens"),
    [("qwen2moe", 10), ("gpt-oss", 10), on_a_gpu("gpt-oss", None), ("smallthinker", None)],
)
def test_expert_changes_do_not_change_the_logits(
    device: str, kernels: Kernels, tmp_path: Path, name: str, stream_min_tokens: int | None
) -> None:
    steps = (4, 4, 1, 1, 1, 12, 1, 1, 1, 1)
    with opened(ZOO[name], tmp_path, LAYERS) as decoder:
        splits, ids = cached_splits(decoder), decoder.ids(sum(steps))
        count = decoder.weights.layers[0].block_of(MoeWeights).ffn_up_exps.experts
        with split_decoder(decoder, device, splits, kernels, stream_min_tokens=stream_min_tokens) as backend:
            used = decoder.specification.layers[0].block_of(MoeSpec).experts_per_token
            policy, gpu_shard = AlwaysChangingPolicy(count, used, experts_of(splits)), backend.gpu_shard
            assert isinstance(gpu_shard, CudaBackend)
            gpu_shard.start_expert_cache(policy)
            result = read_split(backend, ids, steps)
            assert gpu_shard.changed_experts or device == "cuda"
        assert (policy.slots != ExpertCachePolicy(count, used, experts_of(splits)).slots).any()
        assert worst(result, decoder.reference_logits(ids)) < TOLERANCE


def chosen(decoder: Decoder, ids: Sequence[int], kernels: Kernels) -> npt.NDArray[np.int64]:
    """(layers, tokens, experts per token): the experts of each token, as the CPU backend selects them."""
    spec = decoder.specification
    routing = Routing.allocate(spec, len(ids))
    state = DecoderState.allocate(spec, CONTEXT, "f32")
    backend = CpuBackend(spec, decoder.weights, state, kernels, CpuOptions(len(ids), 1), routing=routing)
    try:
        backend.forward(backend.embed(ids), 0)
    finally:
        backend.close()
    return routing.ids


@pytest.mark.slow
@pytest.mark.parametrize("name", ["granitemoe", "smallthinker"])
def test_the_host_counts_the_experts_of_steps_and_prompts(
    device: str, kernels: Kernels, tmp_path: Path, name: str
) -> None:
    with opened(ZOO[name], tmp_path, LAYERS) as decoder:
        splits, steps = cached_splits(decoder), (4, 12, 3, 1, 1)
        spec = decoder.specification.layers[0].block_of(MoeSpec)
        with split_decoder(decoder, device, splits, kernels) as backend:
            policy = AlwaysChangingPolicy(spec.experts, spec.experts_per_token, experts_of(splits))
            policy.check_interval = 1 << 20
            backend.gpu_shard.start_expert_cache(policy)
            read_split(backend, decoder.ids(sum(steps)), steps)
            requested = np.array(list(backend.cpu_shard.requests.values()))
        ids = chosen(decoder, decoder.ids(sum(steps)), kernels)
        counts = [np.bincount(each.ravel(), minlength=spec.experts) for each in ids]
        assert requested[0].tolist() == counts[0].tolist()
        assert requested.sum(axis=1).tolist() == [sum(steps) * spec.experts_per_token] * len(counts)
        assert np.abs(requested - counts).sum() <= 8  # in later layers near-ties may differ


def test_the_policy_receives_request_counts_since_its_last_update(
    device: str, kernels: Kernels, tmp_path: Path
) -> None:
    with opened(ZOO["granitemoe"], tmp_path, LAYERS) as decoder:
        splits = cached_splits(decoder)
        with split_decoder(decoder, device, splits, kernels) as backend:
            spec = decoder.specification.layers[0].block_of(MoeSpec)
            policy = AlwaysChangingPolicy(spec.experts, spec.experts_per_token, experts_of(splits))
            policy.check_interval = 4
            assert isinstance(backend.gpu_shard, CudaBackend)
            backend.gpu_shard.start_expert_cache(policy)
            read_split(backend, decoder.ids(5), (2, 2, 1))
            seen, _ = backend.expert_counts
        # A device that is in its step has received either no change, or all of it.
        received = (seen * 2 // 5, seen * 4 // 5) if device == "cuda" else (seen * 4 // 5,)
        assert policy.counted.sum() in received


class Garbling(expert_loading.Packer):
    """Reverses the groups."""

    def load_groups(
        self, groups: torch.Tensor, target: DeviceMatrix, first_row: int, factor: float = 1.0
    ) -> None:
        raise AssertionError("nobody comes")

    def is_identical(
        self, groups: torch.Tensor, target: DeviceMatrix, first_row: int, factor: float = 1.0
    ) -> bool:
        return super().is_identical(groups.flip(1), target, first_row)


def exhausted(*arguments: object) -> None:
    raise torch.OutOfMemoryError("nothing left")


@pytest.mark.slow
@pytest.mark.parametrize(("packer", "why"), [(exhausted, "no memory"), (Garbling, "other weights")])
def test_a_packing_failure_stops_expert_changes_but_not_generation(
    device: str, kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packer: object, why: str
) -> None:
    monkeypatch.setattr(expert_loading, "Packer", packer)
    with opened(ZOO["granitemoe"], tmp_path, LAYERS) as decoder:
        splits, ids = cached_splits(decoder), decoder.ids(6)
        spec = decoder.specification.layers[0].block_of(MoeSpec)
        with split_decoder(decoder, device, splits, kernels) as backend:
            assert isinstance(backend.gpu_shard, CudaBackend)
            policy = AlwaysChangingPolicy(spec.experts, spec.experts_per_token, experts_of(splits))
            reported = backend.gpu_shard.start_expert_cache(policy)
            assert reported is not None
            assert why in reported
            result = read_split(backend, ids, (4, 1, 1))
            assert backend.gpu_shard.changed_experts == 0
        assert worst(result, decoder.reference_logits(ids)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [1, 2])
def test_experts_are_uploaded_in_pieces(
    device: str, kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    monkeypatch.setattr(expert_loading, "EXPERT_LOAD_BYTES", 1)
    monkeypatch.setattr(expert_loading, "PIECES_PER_STEP", pieces)
    model = replace(ZOO["granitemoe"], expert_length=32)
    groups = (2 * model.expert_length + model.width) // 16
    steps = (1,) * (groups // pieces + 6)
    with opened(model, tmp_path, LAYERS) as decoder:
        splits, ids = cached_splits(decoder), decoder.ids(len(steps))
        spec = decoder.specification.layers[0].block_of(MoeSpec)
        with split_decoder(decoder, device, splits, kernels) as backend:
            assert isinstance(backend.gpu_shard, CudaBackend)
            backend.gpu_shard.start_expert_cache(
                AlwaysChangingPolicy(spec.experts, spec.experts_per_token, experts_of(splits))
            )
            result = read_split(backend, ids, steps)
            assert backend.gpu_shard.changed_experts
        assert worst(result, decoder.reference_logits(ids)) < TOLERANCE


@pytest.mark.parametrize("name", sorted({"F16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4", "IQ4_XS", "Q3_K"}))
def test_host_layout_rows_are_converted_back_to_file_layout(kernels: Kernels, name: str) -> None:
    columns = 512
    raw = random_bits(name, 48, columns)
    groups = groups_of(raw, name, columns, kernels)
    assert torch.equal(rows_of_groups(groups, name), torch.from_numpy(raw))


def groups_of(raw: npt.NDArray[np.uint8], name: str, columns: int, kernels: Kernels) -> torch.Tensor:
    """(rows, bytes) of a file as groups of sixteen rows in host layout."""
    layout = interleave(Matrix("m", name, len(raw), columns, raw), kernels)
    return torch.from_numpy(layout[: raw.size].reshape(len(raw) // 16, -1).copy())


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4", "NVFP4", "F16"])
def test_captured_packing_equals_packing_at_load(device: str, kernels: Kernels, name: str) -> None:
    experts, rows, columns = 3, 64, 512
    raw = random_bits(name, experts * rows, columns)
    factors = [0.5, 2.0, 3.0] if name == "NVFP4" else [1.0] * experts
    stack, target_device = Matrix("m", name, rows, columns, raw, experts), torch.device(device)
    sources = [torch.from_numpy(each) for each in np.split(raw, experts)]
    loaded, target = (
        Arena(target_device, 1 << 20).matrix("m", name, experts * rows, columns) for _ in range(2)
    )
    order = (2, 0, 1)
    for slot, expert in enumerate(order):
        own = torch.full((rows,), factors[expert], device=device)
        loaded.fill(slot * rows, sources[expert].to(target_device), own)
    pool = torch.cuda.graph_pool_handle() if device == "cuda" else None
    packers = {count: expert_loading.Packer(stack, count, target_device, pool) for count in (3, 1)}
    stream = torch.cuda.Stream() if device == "cuda" else None
    with torch.cuda.stream(stream) if stream else nullcontext():
        for slot, expert in enumerate(order):
            groups = groups_of(sources[expert].numpy(), name, columns, kernels)
            packers[3].load_groups(groups[:3], target, slot * rows, factors[expert])
            packers[1].load_groups(groups[3:], target, slot * rows + 48, factors[expert])
    if stream:
        stream.synchronize()
    for actual, expected in zip(target.parts, loaded.parts, strict=True):
        assert torch.equal(actual, expected)
