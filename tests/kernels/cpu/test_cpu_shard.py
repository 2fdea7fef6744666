"""The CPU shard of a split model, with a test thread as its device."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.model_config.weights import read_config, read_weights, rope_factors
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.compiler.kernel_units import SERVICE, row_units, sparse_units
from edgeinfer_kernels.cpu.cpu_shard import CpuShard, ExchangeRows, ShardOptions
from edgeinfer_kernels.cpu.layout.packed_matrix import address
from edgeinfer_kernels.cpu.runtime.kernel_args import ANSWERED, EXCHANGE_WORDS, GIVEN_UP, SENT
from edgeinfer_kernels.cpu.sparse import SparseLayers
from edgeinfer_kernels.decoder import BlockIndex
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.neuron_predictor import NeuronPredictor
from edgeinfer_kernels.stages import GPU, cpu_stages
from edgeinfer_quant_formats import GGUFFile
from harness.hot_neurons.time_split import TimedShard
from tests.kernels.conftest import BEST, built_kernels
from tests.kernels.row_matrices import random_matrix
from tests.kernels.split_layers import LayerSplit, stages_of
from tests.model_zoo import ZOO

CPU_ONLY, ATTENTION_ON_GPU, HALF_ON_GPU = (
    LayerSplit(False),
    LayerSplit(True, neurons=96),
    LayerSplit(True, neurons=64),
)
SECOND = LayerSplit(True)
BATCH, WIDTH, EXPERTS_PER_TOKEN, CONTEXT = 8, 64, 3, 32
MODELS = {**ZOO, "arcee in Q8_0": replace(ZOO["arcee"], formats=("Q8_0",))}
SECONDS = 20.0


@dataclass
class FakeExchange:
    """An exchange buffer in memory of the test."""

    words: npt.NDArray[np.int64]
    rows: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]

    @classmethod
    def empty(cls) -> "FakeExchange":
        return cls(
            np.zeros(EXCHANGE_WORDS, np.int64),
            np.zeros((BATCH, WIDTH), np.float32),
            np.zeros(BATCH * EXPERTS_PER_TOKEN, np.int64),
            np.zeros(BATCH * EXPERTS_PER_TOKEN, np.float32),
        )

    @property
    def addresses(self) -> ExchangeRows:
        return ExchangeRows(
            address(self.words), address(self.rows), 4 * WIDTH, address(self.ids), address(self.weights)
        )


@contextmanager
def cpu_shard_of(
    name: str,
    splits: list[LayerSplit],
    kernels: Kernels,
    folder: Path,
    in_file: Sequence[BlockIndex] = (),
    sparse: SparseLayers | None = None,
) -> Iterator[tuple[CpuShard, FakeExchange]]:
    with GGUFFile.open(MODELS[name].write(folder / "model.gguf")) as file:
        config = read_config(file)
        spec = config.specification(rope_factors(file, config, CONTEXT))
        here = [index for index in spec.indices() if not splits[index.layer].on_gpu]
        state = DecoderState.allocate(spec, CONTEXT, "f32", here)
        exchange_buffer = FakeExchange.empty()
        host = CpuShard(
            spec,
            read_weights(file, config),
            stages_of(spec, splits),
            state,
            kernels,
            exchange_buffer.addresses,
            ShardOptions(BATCH, 3, in_file=in_file, sparse=sparse or {}),
        )
        try:
            yield host, exchange_buffer
        finally:
            host.close()


def rows_for(stage: int, tokens: int) -> npt.NDArray[np.float32]:
    """What the device writes in a stage."""
    return np.random.default_rng(stage).standard_normal((tokens, WIDTH)).astype(np.float32)


def wait_for(words: npt.NDArray[np.int64], at: int, number: int) -> None:
    deadline = threading.Event()
    timer = threading.Timer(SECONDS, deadline.set)
    timer.start()
    while words[at] < number:
        assert not deadline.is_set(), f"word {at} is {words[at]}, wanted {number}"
    timer.cancel()


def test_cpu_stages_are_merged_up_to_a_device_sum(tmp_path: Path, kernels: Kernels) -> None:
    order = [
        CPU_ONLY,
        SECOND,
        CPU_ONLY,
        HALF_ON_GPU,
        CPU_ONLY,
        ATTENTION_ON_GPU,
        CPU_ONLY,
        CPU_ONLY,
        ATTENTION_ON_GPU,
    ]
    with cpu_shard_of("llama", [ATTENTION_ON_GPU, HALF_ON_GPU, SECOND], kernels, tmp_path) as (host, _):
        assert host.stages == ((), (BlockIndex(1, 1),), (BlockIndex(2, 1),))
    with GGUFFile.open(tmp_path / "model.gguf") as file:
        config = read_config(file)
        spec = config.specification()
        spec = replace(spec, layers=(spec.layers[0],) * len(order))
        stages = cpu_stages(spec, GPU, stages_of(spec, order))
    both = [(BlockIndex(i, 0), BlockIndex(i, 1)) for i in range(len(order))]
    assert stages.stages == (
        both[0],
        (BlockIndex(1, 1), *both[2]),
        (BlockIndex(3, 1),),
        both[4],
        (*both[6], *both[7]),
    )
    assert stages.parallel == (0, 2, 0, 3, 0, 0, 0, 0)
    assert stages.after == (0, 0, 0, 4, 0, 5, 0, 0)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    ("name", "splits"),
    [
        ("llama", [CPU_ONLY, HALF_ON_GPU, SECOND]),
        ("llama", [SECOND, CPU_ONLY, ATTENTION_ON_GPU]),
        ("granitemoe", [CPU_ONLY, SECOND, SECOND]),
    ],
)
def test_serving_a_device_equals_running_each_cpu_stage(
    tmp_path: Path, kernels: Kernels, name: str, splits: list[LayerSplit], tokens: int
) -> None:
    with cpu_shard_of(name, splits, kernels, tmp_path) as (host, exchange_buffer):
        count = len(host.stages)
        random = np.random.default_rng(3)
        exchange_buffer.ids[:] = (
            random.integers(-1, 8, len(exchange_buffer.ids)) if name == "granitemoe" else 0
        )
        exchange_buffer.weights[:] = random.random(len(exchange_buffer.weights))
        expected = []
        for stage in range(1, count + 1):
            exchange_buffer.rows[:tokens] = rows_for(stage, tokens)
            host.run_stage(stage, tokens, 0)
            expected.append(exchange_buffer.rows[:tokens].copy())
        assert all(np.isfinite(rows).all() for rows in expected)
        for again in range(20):
            exchange_buffer.words[:] = 0
            exchange_buffer.rows[:tokens] = rows_for(1, tokens)
            if not host.stages[0]:
                exchange_buffer.words[ANSWERED] = 1
            serving = threading.Thread(target=host.serve, args=(tokens, 0))
            serving.start()
            for stage in range(1, count + 1):
                if stage > 1:
                    exchange_buffer.rows[:tokens] = rows_for(stage, tokens)
                    exchange_buffer.words[SENT] = stage
                wait_for(exchange_buffer.words, ANSWERED, stage)
                if stage > 1 or host.stages[0]:
                    np.testing.assert_array_equal(
                        exchange_buffer.rows[:tokens], expected[stage - 1], err_msg=str(again)
                    )
            serving.join(SECONDS)
            assert not serving.is_alive()
            assert exchange_buffer.words[GIVEN_UP] == 0


def test_timed_stages_equal_those_of_a_normal_step(tmp_path: Path, kernels: Kernels) -> None:
    splits = [CPU_ONLY, SECOND, ATTENTION_ON_GPU]
    with cpu_shard_of("llama", splits, kernels, tmp_path) as (host, exchange_buffer):
        timed, served = TimedShard(host, exchange_buffer.words), []
        for server in (host, timed):
            timed.times.begin_token()
            exchange_buffer.words[:] = 0
            exchange_buffer.words[SENT] = len(host.stages)  # The device never changes the rows.
            exchange_buffer.rows[:1] = rows_for(1, 1)
            server.serve(1, 0)
            assert exchange_buffer.words[ANSWERED] == len(host.stages)
            served.append(exchange_buffer.rows[:1].copy())
        assert np.array_equal(served[0], served[1])
        assert timed.times.attentions + timed.times.feed_forwards == sum(map(len, host.steps))
        assert min(timed.times.attention[-1], timed.times.feed_forward[-1]) > 0


@pytest.mark.parametrize("tokens", [1, BATCH])
@pytest.mark.parametrize(
    ("name", "splits"),
    [
        ("llama", [CPU_ONLY, HALF_ON_GPU, SECOND]),
        ("granitemoe", [CPU_ONLY, SECOND, LayerSplit(True, experts=(1, 4, 6))]),
    ],
)
def test_memory_mapped_weights_give_the_same_bits(
    tmp_path: Path, kernels: Kernels, name: str, splits: list[LayerSplit], tokens: int
) -> None:
    result = []
    left = [BlockIndex(0, 0), *(BlockIndex(layer, 1) for layer in range(3))]
    for in_file in ([], left[2:], left):
        with cpu_shard_of(name, splits, kernels, Path(mkdtemp(dir=tmp_path)), in_file) as (
            host,
            exchange_buffer,
        ):
            random = np.random.default_rng(3)
            exchange_buffer.ids[:] = random.integers(-1, 5, len(exchange_buffer.ids))
            exchange_buffer.weights[:] = random.random(len(exchange_buffer.weights))
            rows = []
            for stage in range(1, len(host.stages) + 1):
                exchange_buffer.rows[:tokens] = rows_for(stage, tokens)
                host.run_stage(stage, tokens, 0)
                rows.append(exchange_buffer.rows[:tokens].copy())
            result.append(rows)
    assert all(np.isfinite(row).all() for row in result[0])
    np.testing.assert_array_equal(result[1], result[0])
    np.testing.assert_array_equal(result[2], result[0])


@pytest.fixture(scope="module")
def sparse_kernels() -> Kernels:
    return built_kernels(BEST, [SERVICE, *row_units(["Q8_0"]), *sparse_units(["Q8_0"])])


def predictor_of_the_first(neurons: int) -> NeuronPredictor:
    """A predictor of the first `count` of 128 neurons, for any input."""
    first = random_matrix("Q8_0", 32, WIDTH)
    second = random_matrix("Q8_0", 128, 32)
    bias = np.where(np.arange(128) < neurons, 1e6, -1e6).astype(np.float32)
    return NeuronPredictor(first, second, bias)


@pytest.mark.parametrize("tokens", [1, BATCH])
@pytest.mark.parametrize("predictor", [None, predictor_of_the_first(128)])
def test_the_cold_part_of_a_feed_forward_may_be_sparse(
    tmp_path: Path, sparse_kernels: Kernels, tokens: int, predictor: NeuronPredictor | None
) -> None:
    splits = [CPU_ONLY, HALF_ON_GPU, SECOND]
    result = []
    for sparse in (None, dict.fromkeys(range(3), predictor)):
        with cpu_shard_of(
            "arcee in Q8_0", splits, sparse_kernels, Path(mkdtemp(dir=tmp_path)), (), sparse
        ) as (
            host,
            exchange_buffer,
        ):
            functions = {function for stage in host.steps for _, (function, _, _) in stage}
            assert (sparse_kernels.address("sparse_feed_forward_block") in functions) == bool(sparse)
            rows = []
            for stage in range(1, len(host.stages) + 1):
                exchange_buffer.rows[:tokens] = rows_for(stage, tokens)
                host.run_stage(stage, tokens, 0)
                rows.append(exchange_buffer.rows[:tokens].copy())
            result.append(np.array(rows))
    assert np.linalg.norm(result[1] - result[0]) < 1e-5 * np.linalg.norm(result[0])


def test_a_predictor_covers_the_neurons_of_the_shard(tmp_path: Path, sparse_kernels: Kernels) -> None:
    # The first half of the second layer is on the device: the predictor selects none of the neurons here.
    sparse = {1: predictor_of_the_first(64)}
    with cpu_shard_of(
        "arcee in Q8_0",
        [ATTENTION_ON_GPU, HALF_ON_GPU, ATTENTION_ON_GPU],
        sparse_kernels,
        tmp_path,
        (),
        sparse,
    ) as (
        host,
        box,
    ):
        box.rows[:1] = rows_for(1, 1)
        host.run_stage(2, 1, 0)
        np.testing.assert_array_equal(box.rows[:1], rows_for(1, 1))


def test_a_device_that_timed_out_does_not_block_the_cpu(tmp_path: Path, kernels: Kernels) -> None:
    with cpu_shard_of("llama", [SECOND, SECOND, SECOND], kernels, tmp_path) as (host, exchange_buffer):
        exchange_buffer.words[ANSWERED] = 1
        serving = threading.Thread(target=host.serve, args=(1, 0))
        serving.start()
        exchange_buffer.words[SENT] = 2
        wait_for(exchange_buffer.words, ANSWERED, 2)
        assert serving.is_alive()
        exchange_buffer.words[GIVEN_UP] = 1
        serving.join(SECONDS)
        assert not serving.is_alive()
        assert exchange_buffer.words[ANSWERED] == len(host.stages)
