"""Tensor parallel: the ranks' logits, samples and states are those of one GPU. Two processes with gloo and
the interpreter, or two GPUs.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from edgeinfer.loading.tensor.job import TensorJob
from edgeinfer.model_config.weights import read_config, read_weights, rope_factors
from edgeinfer_kernels.backend import BackendError
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.device_parts import DeviceOptions
from edgeinfer_kernels.cuda.tensor.torch_collective import PEERS
from edgeinfer_kernels.tensor_parts import Sums
from edgeinfer_offload.runtime.rank_processes import RankError, RankProcesses
from edgeinfer_offload.runtime.tensor_backend import TensorBackend
from edgeinfer_quant_formats import GGUFFile
from tests.kernels.cuda.conftest import HAS_GPU
from tests.kernels.cuda.decoders import CONTEXT, STEP_TOKENS, Decoder, read
from tests.model_zoo import ZOO
from tests.random_models import RandomModel

MODULE = "tests.kernels.cuda.devices.interpreted_rank"
CHUNK = 16
ROUNDING = 1e-2 if HAS_GPU else 1e-3
"""Prompts are float16 products, and the cache is float16: sums in another order change some roundings."""
MODELS: dict[str, tuple[RandomModel, tuple[float, ...], Sums]] = {
    "llama, 3:1": (replace(ZOO["llama"], layers=2, kv_heads=4, heads=8), (3.0, 1.0), "torch"),
    "qwen3, peer memory": (replace(ZOO["qwen3"], layers=2), (1.0, 1.0), "peers"),
    "experts and a shared one": (replace(ZOO["qwen2moe"], layers=2), (1.0, 1.0), "torch"),
    "biases, peer memory": (
        replace(ZOO["llama-tied-biases"], layers=2, biases=("attn_q", "attn_output")),
        (1.0, 1.0),
        "peers",
    ),
    "tied, biases": (
        replace(ZOO["llama-tied-biases"], layers=2, biases=("attn_q", "attn_output")),
        (1.0, 1.0),
        "torch",
    ),
    "windows, post-norms, peer memory": (replace(ZOO["gemma3"], layers=2), (1.0, 1.0), "peers"),
    "sinks, peer memory": (replace(ZOO["gpt-oss"], layers=2), (1.0, 1.0), "peers"),
}
DRAFTING = "qwen3, peer memory"
"""In the tests of trees and of states; norms of heads, with logits and samples, are those of the windows."""
SETTINGS = SimpleNamespace(
    temperature=0.8,
    top_k=20,
    top_p=0.95,
    min_p=0.0,
    repeat_penalty=1.1,
    frequency_penalty=0.0,
    presence_penalty=0.0,
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() == 1, reason="one GPU: the ranks need one each"),
]


def devices(count: int) -> list[str]:
    return [f"cuda:{rank}" if HAS_GPU else "cpu" for rank in range(count)]


@contextmanager
def tensor_parallel(path: Path, shares: tuple[float, ...], sums: Sums = "torch") -> Iterator[TensorBackend]:
    def jobs(store: str) -> list[TensorJob]:
        job = TensorJob(path, "m", CONTEXT, 0, shares, "", store, chunk=CHUNK, step_tokens=STEP_TOKENS)
        return [
            replace(job, rank=rank, device=each, sums=sums) for rank, each in enumerate(devices(len(shares)))
        ]

    processes = RankProcesses(MODULE, jobs, [f"GPU {rank}" for rank in range(len(shares))])
    try:
        yield TensorBackend(processes, CHUNK)
    finally:
        processes.close()


@contextmanager
def one_gpu(path: Path) -> Iterator[tuple[Decoder, CudaBackend]]:
    """The whole model on one device."""
    with GGUFFile.open(path) as file:
        config = read_config(file)
        decoder = Decoder(
            config.specification(rope_factors(file, config, CONTEXT)), read_weights(file, config)
        )
        backend = CudaBackend(
            decoder.specification,
            decoder.weights,
            CONTEXT,
            torch.device(devices(1)[0]),
            DeviceOptions(chunk=CHUNK, step_tokens=STEP_TOKENS),
        )
        yield decoder, backend
        backend.close()


@pytest.mark.parametrize("name", [name for name in MODELS if name != DRAFTING])
def test_ranks_have_the_logits_and_samples_of_one_gpu(name: str, tmp_path: Path) -> None:
    model, shares, sums = MODELS[name]
    path = model.write(tmp_path / "model.gguf")
    with one_gpu(path) as (decoder, one), tensor_parallel(path, shares, sums) as ranks:
        assert (ranks.ranks[1].sums == PEERS) == (sums == "peers")
        ids = decoder.ids(24)
        expected, found = read(one, ids, (16, 5, 1)), read(ranks, ids, (16, 5, 1))  # type: ignore[arg-type]
        for at, logits in expected.items():
            assert np.linalg.norm(found[at] - logits) < ROUNDING * np.linalg.norm(logits)
        for start, uniform in ((22, None), (23, 0.3)):
            request = None if uniform is None else ranks.sampling_request(SETTINGS, 2, uniform)
            recent = () if uniform is None else ids[:2]
            samples = [backend.sample_next(ids[start], start, request, recent) for backend in (one, ranks)]
            assert samples[0] == samples[1] >= 0
        assert sum(rank.nbytes for rank in ranks.ranks) > one.nbytes > max(r.nbytes for r in ranks.ranks)


def test_states_are_restored_and_errors_leave_the_ranks_alive(tmp_path: Path) -> None:
    model, shares, _ = MODELS[DRAFTING]
    path = model.write(tmp_path / "model.gguf")
    with one_gpu(path) as (decoder, _), tensor_parallel(path, shares) as ranks:
        ids = decoder.ids(13)
        first = read(ranks, ids, (12, 1))[12]  # type: ignore[arg-type]
        ranks.call_rank(0, "begin_profile")
        best = ranks.best_ids(ids[12:], 12)
        assert best == [int(first.argmax())]
        assert bool(ranks.call_rank(0, "end_profile")) == HAS_GPU
        held = ranks.snapshot(12)
        assert sum(array.nbytes for array in held) > 0
        read(ranks, ids[::-1], (13,))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="of another cache"):
            ranks.restore(held[2:], 12)
        with pytest.raises(ValueError, match="wanted rising ones"):
            ranks.evict(np.array([3, 2]), 12)
        ranks.restore(held, 12)
        again = ranks.embed(ids[12:])
        ranks.forward(again, 12)
        np.testing.assert_allclose(ranks.logits(again)[0], first, rtol=0, atol=1e-6)
        np.testing.assert_array_equal(ranks.final_norm(again).shape, (1, model.width))
        contents = ranks.read_pages([0])
        assert [len(parts) for parts in contents] == [2]
        read(ranks, ids[::-1], (13,))  # type: ignore[arg-type]
        ranks.write_pages([0], contents)
        again = ranks.embed(ids[12:])
        ranks.forward(again, 12)
        np.testing.assert_allclose(ranks.logits(again)[0], first, rtol=0, atol=1e-6)
        process_ids = ranks.processes.process_ids
        os.kill(process_ids[1], signal.SIGKILL)
        with pytest.raises(BackendError, match="the process of GPU 1 ended by signal 9; load"):
            ranks.sample_next(ids[0], 13)
        assert ranks.processes.process_ids == []


@pytest.mark.slow
def test_ranks_verify_a_tree_and_keep_a_path(tmp_path: Path) -> None:
    model, shares, sums = MODELS[DRAFTING]
    path, parents = model.write(tmp_path / "model.gguf"), (-1, -1, 1, 0)
    with one_gpu(path) as (decoder, one), tensor_parallel(path, shares, sums) as ranks:
        ids, results = decoder.ids(18), []
        assert ranks.capabilities.max_tree_tokens == STEP_TOKENS
        for backend in (one, ranks):
            read(backend, ids, (12,))  # type: ignore[arg-type]
            x = backend.embed(ids[12:17])
            backend.forward_tree(x, 12, parents)  # type: ignore[arg-type]
            logits = backend.logits(x)  # type: ignore[arg-type]
            assert backend.best_ids(ids[12:17], 12, parents) == logits.argmax(axis=1).tolist()
            backend.keep_path(12, parents, [0, 2, 3])
            results.append([*logits, *read(backend, ids[17:], (1,), start=15).values()])  # type: ignore[arg-type]
        for expected, found in zip(*results, strict=True):
            assert np.linalg.norm(found - expected) < ROUNDING * np.linalg.norm(expected)


def test_a_file_that_cannot_be_divided_ends_all_ranks_with_its_reason(tmp_path: Path) -> None:
    path = ZOO["olmo2"].write(tmp_path / "model.gguf")
    with pytest.raises(RankError, match="divided among GPUs: a norm of all heads"):
        tensor_parallel(path, (1.0, 1.0)).__enter__()


def sample_many(ranks: TensorBackend) -> None:
    for start in range(3, 40):
        ranks.sample_next(5, start)


@pytest.mark.skipif(not HAS_GPU, reason="the memory of GPUs")
def test_ten_killed_ranks_leave_no_memory_on_their_gpus(tmp_path: Path) -> None:
    path = MODELS[DRAFTING][0].write(tmp_path / "model.gguf")
    free = [torch.cuda.mem_get_info(index)[0] for index in range(2)]
    for round_number in range(10):
        with tensor_parallel(path, (1.0, 1.0), "auto") as ranks:
            read(ranks, [5, 6, 7], (3,))  # type: ignore[arg-type]
            os.kill(ranks.processes.process_ids[round_number % 2], signal.SIGKILL)
            with pytest.raises(BackendError, match="ended by signal 9"):
                sample_many(ranks)
    for index, before in enumerate(free):
        assert torch.cuda.mem_get_info(index)[0] > before - (64 << 20)
