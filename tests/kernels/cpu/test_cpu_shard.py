"""The host's half of a divided decoder, served to a device that a thread of the test plays."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

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
from tests.kernels.conftest import BEST, built_kernels
from tests.kernels.row_matrices import random_matrix
from tests.kernels.split_layers import LayerSplit, stages_of
from tests.random_models import ZOO

HERE, THERE, HALF = LayerSplit(False), LayerSplit(True, neurons=96), LayerSplit(True, neurons=64)
SECOND = LayerSplit(True)
BATCH, WIDTH, EXPERTS_PER_TOKEN, CONTEXT = 8, 64, 3, 32
MODELS = {**ZOO, "arcee in Q8_0": replace(ZOO["arcee"], formats=("Q8_0",))}
SECONDS = 20.0


@dataclass
class PlainMailbox:
    """An exchange buffer in memory of the test."""

    words: npt.NDArray[np.int64]
    rows: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]

    @classmethod
    def empty(cls) -> "PlainMailbox":
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
def host_half(
    name: str,
    divisions: list[LayerSplit],
    kernels: Kernels,
    folder: Path,
    in_file: Sequence[BlockIndex] = (),
    sparse: SparseLayers | None = None,
) -> Iterator[tuple[CpuShard, PlainMailbox]]:
    with GGUFFile.open(MODELS[name].write(folder / "model.gguf")) as file:
        config = read_config(file)
        facts = config.specification(rope_factors(file, config, CONTEXT))
        here = [index for index in facts.indices() if not divisions[index.layer].on_gpu]
        state = DecoderState.allocate(facts, CONTEXT, "f32", here)
        exchange_buffer = PlainMailbox.empty()
        host = CpuShard(
            facts,
            read_weights(file, config),
            stages_of(facts, divisions),
            state,
            kernels,
            exchange_buffer.addresses,
            ShardOptions(BATCH, 3, in_file=in_file, sparse=sparse or {}),
        )
        try:
            yield host, exchange_buffer
        finally:
            host.close()


def rows_for(turn: int, tokens: int) -> npt.NDArray[np.float32]:
    """What the device sends in a turn."""
    return np.random.default_rng(turn).standard_normal((tokens, WIDTH)).astype(np.float32)


def wait_for(words: npt.NDArray[np.int64], at: int, number: int) -> None:
    deadline = threading.Event()
    timer = threading.Timer(SECONDS, deadline.set)
    timer.start()
    while words[at] < number:
        assert not deadline.is_set(), f"word {at} is {words[at]}, wanted {number}"
    timer.cancel()


def test_turns_follow_each_other_as_far_as_no_sum_is_made_on_the_device(
    tmp_path: Path, kernels: Kernels
) -> None:
    order = [HERE, SECOND, HERE, HALF, HERE, THERE, HERE, HERE, THERE]
    with host_half("llama", [THERE, HALF, SECOND], kernels, tmp_path) as (host, _):
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


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    ("name", "divisions"),
    [
        ("llama", [HERE, HALF, SECOND]),
        ("llama", [SECOND, HERE, THERE]),
        ("granitemoe", [HERE, SECOND, SECOND]),
    ],
)
def test_serving_a_device_gives_what_taking_turn_after_turn_does(
    tmp_path: Path, kernels: Kernels, name: str, divisions: list[LayerSplit], tokens: int
) -> None:
    with host_half(name, divisions, kernels, tmp_path) as (host, exchange_buffer):
        count = len(host.stages)
        random = np.random.default_rng(3)
        exchange_buffer.ids[:] = (
            random.integers(-1, 8, len(exchange_buffer.ids)) if name == "granitemoe" else 0
        )
        exchange_buffer.weights[:] = random.random(len(exchange_buffer.weights))
        wanted = []
        for turn in range(1, count + 1):
            exchange_buffer.rows[:tokens] = rows_for(turn, tokens)
            host.run_stage(turn, tokens, 0)
            wanted.append(exchange_buffer.rows[:tokens].copy())
        assert all(np.isfinite(rows).all() for rows in wanted)
        for again in range(20):
            exchange_buffer.words[:] = 0
            exchange_buffer.rows[:tokens] = rows_for(1, tokens)
            if not host.stages[0]:
                exchange_buffer.words[ANSWERED] = 1
            serving = threading.Thread(target=host.serve, args=(tokens, 0))
            serving.start()
            for turn in range(1, count + 1):
                if turn > 1:
                    exchange_buffer.rows[:tokens] = rows_for(turn, tokens)
                    exchange_buffer.words[SENT] = turn
                wait_for(exchange_buffer.words, ANSWERED, turn)
                if turn > 1 or host.stages[0]:
                    np.testing.assert_array_equal(
                        exchange_buffer.rows[:tokens], wanted[turn - 1], err_msg=str(again)
                    )
            serving.join(SECONDS)
            assert not serving.is_alive()
            assert exchange_buffer.words[GIVEN_UP] == 0


@pytest.mark.parametrize("tokens", [1, BATCH])
@pytest.mark.parametrize(
    ("name", "divisions"),
    [
        ("llama", [HERE, HALF, SECOND]),
        ("granitemoe", [HERE, SECOND, LayerSplit(True, experts=(1, 4, 6))]),
    ],
)
def test_weights_that_stay_in_the_file_give_the_same_to_the_last_bit(
    tmp_path: Path, kernels: Kernels, name: str, divisions: list[LayerSplit], tokens: int
) -> None:
    found = []
    left = [BlockIndex(0, 0), *(BlockIndex(layer, 1) for layer in range(3))]
    for in_file in ([], left[2:], left):
        with host_half(name, divisions, kernels, tmp_path, in_file) as (host, exchange_buffer):
            random = np.random.default_rng(3)
            exchange_buffer.ids[:] = random.integers(-1, 5, len(exchange_buffer.ids))
            exchange_buffer.weights[:] = random.random(len(exchange_buffer.weights))
            rows = []
            for turn in range(1, len(host.stages) + 1):
                exchange_buffer.rows[:tokens] = rows_for(turn, tokens)
                host.run_stage(turn, tokens, 0)
                rows.append(exchange_buffer.rows[:tokens].copy())
            found.append(rows)
    assert all(np.isfinite(row).all() for row in found[0])
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])


@pytest.fixture(scope="module")
def sparse_kernels() -> Kernels:
    return built_kernels(BEST, [SERVICE, *row_units(["Q8_0"]), *sparse_units(["Q8_0"])])


def predictor_of_the_first(neurons: int) -> NeuronPredictor:
    """One that names the first so many of 128 neurons, whatever comes."""
    first = random_matrix("Q8_0", 32, WIDTH)
    second = random_matrix("Q8_0", 128, 32)
    bias = np.where(np.arange(128) < neurons, 1e6, -1e6).astype(np.float32)
    return NeuronPredictor(first, second, bias)


@pytest.mark.parametrize("tokens", [1, BATCH])
@pytest.mark.parametrize("predictor", [None, predictor_of_the_first(128)])
def test_the_cold_part_of_a_feed_forward_may_be_sparse(
    tmp_path: Path, sparse_kernels: Kernels, tokens: int, predictor: NeuronPredictor | None
) -> None:
    divisions = [HERE, HALF, SECOND]
    found = []
    for sparse in (None, dict.fromkeys(range(3), predictor)):
        with host_half("arcee in Q8_0", divisions, sparse_kernels, tmp_path, (), sparse) as (
            host,
            exchange_buffer,
        ):
            functions = {function for turn in host.steps for function, _, _ in turn}
            assert (sparse_kernels.address("sparse_feed_forward_block") in functions) == bool(sparse)
            rows = []
            for turn in range(1, len(host.stages) + 1):
                exchange_buffer.rows[:tokens] = rows_for(turn, tokens)
                host.run_stage(turn, tokens, 0)
                rows.append(exchange_buffer.rows[:tokens].copy())
            found.append(np.array(rows))
    assert np.linalg.norm(found[1] - found[0]) < 1e-5 * np.linalg.norm(found[0])


def test_a_predictor_is_asked_about_the_neurons_that_are_here(
    tmp_path: Path, sparse_kernels: Kernels
) -> None:
    # Of the second layer the first half lies on the device: the neurons here are none that it names.
    sparse = {1: predictor_of_the_first(64)}
    with host_half("arcee in Q8_0", [THERE, HALF, THERE], sparse_kernels, tmp_path, (), sparse) as (
        host,
        box,
    ):
        box.rows[:1] = rows_for(1, 1)
        host.run_stage(2, 1, 0)
        np.testing.assert_array_equal(box.rows[:1], rows_for(1, 1))


def test_a_device_that_was_given_up_keeps_nobody_waiting(tmp_path: Path, kernels: Kernels) -> None:
    with host_half("llama", [SECOND, SECOND, SECOND], kernels, tmp_path) as (host, exchange_buffer):
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
