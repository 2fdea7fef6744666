"""Quantizing a file: plan and file agree, workers change nothing, importance reaches its columns."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from edgeinfer_quant_formats import FormatError, GGUFFile, GGUFWriter, encode
from edgeinfer_quant_formats.quantizer import quantizing
from edgeinfer_quant_formats.quantizer.encoding_pool import EncodingPool, Piece, WorkerError
from edgeinfer_quant_formats.quantizer.importance_file import Importance
from edgeinfer_quant_formats.quantizer.mixes import MIXES, find_mix
from edgeinfer_quant_formats.quantizer.quantizing import plan_quantization, write_quantized
from edgeinfer_quant_formats.quantizer.tensor_roles import is_quantized
from tests.quant_formats.mix_models import MODELS, MixModel, columns_of

ARCEE = MixModel("arcee", 2)
EXPERTS = MixModel("qwen3moe", 1, heads=32, key_heads=4, experts=4)


def quantize(source: Path, mix: str, processes: int = 1, importance: Importance | None = None) -> Path:
    target = source.with_name(f"{mix}-{processes}.gguf")
    with GGUFFile.open(source) as file:
        plan = plan_quantization(file, find_mix(mix), importance=importance)
        write_quantized(file, plan, target, processes=processes)
    return target


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces a tensor, and workers for the smallest model."""
    monkeypatch.setattr(quantizing, "PIECE_WEIGHTS", 600)
    monkeypatch.setattr(quantizing, "MIN_WEIGHTS_FOR_WORKERS", 1)


@pytest.mark.default_cases(16)
@pytest.mark.parametrize("mix", MIXES)
def test_the_file_equals_the_plan(mix: str, tmp_path: Path) -> None:
    source = MODELS["llama, three layers"].write(tmp_path / "source.gguf")
    with GGUFFile.open(source) as file, GGUFFile.open(quantize(source, mix)) as written:
        plan = plan_quantization(file, find_mix(mix))
        assert list(written.tensors) == list(file.tensors)
        for tensor in plan.tensors:
            seen = written.tensors[tensor.info.name]
            assert (seen.format, seen.shape, seen.nbytes) == (tensor.target, tensor.info.shape, tensor.nbytes)
            expected = encode(file.decode(tensor.info.name), tensor.target)
            np.testing.assert_array_equal(written.raw(tensor.info.name).reshape(-1), expected)
        assert written.nbytes == plan.nbytes
        assert written.metadata["general.file_type"] == find_mix(mix).file_type
        assert written.metadata["general.quantization_version"] == 2
        assert written.metadata["llama.block_count"] == 3


@pytest.mark.slow
def test_workers_and_chunk_sizes_do_not_change_the_file(small_pieces: None, tmp_path: Path) -> None:
    source = ARCEE.write(tmp_path / "source.gguf")
    importance = importance_for(ARCEE.shapes())
    alone = quantize(source, "Q4_K_M", 1, importance).read_bytes()
    assert quantize(source, "Q4_K_M", 3, importance).read_bytes() == alone


def importance_for(shapes: Mapping[str, tuple[int, ...]]) -> Importance:
    random = np.random.default_rng(62)
    columns = columns_of(dict(shapes))
    return Importance(
        {name: random.gamma(0.5, size=count).astype(np.float32) for name, count in columns.items()}
    )


def test_importance_applies_to_its_columns_and_those_of_each_expert(
    small_pieces: None, tmp_path: Path
) -> None:
    source, importance = EXPERTS.write(tmp_path / "source.gguf"), importance_for(EXPERTS.shapes())
    with GGUFFile.open(source) as file, GGUFFile.open(quantize(source, "Q4_0", 1, importance)) as written:
        for name in ("blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight"):
            weights, columns = file.decode(name), importance.tensors[name]
            weights = weights.reshape(-1, weights.shape[-2], weights.shape[-1])
            for matrix, used in enumerate(columns.reshape(len(weights), -1)):
                expected = encode(weights[matrix], written.tensors[name].format, used)
                seen = written.raw(name).reshape(len(weights), -1)[matrix]
                np.testing.assert_array_equal(seen, expected)


def test_tensors_without_importance_are_reported(tmp_path: Path) -> None:
    with GGUFFile.open(ARCEE.write(tmp_path / "source.gguf")) as file:
        plan = plan_quantization(file, find_mix("Q4_K_M"), importance=Importance({}))
        quantized = [name for name, info in file.tensors.items() if is_quantized(name, info.shape, "arcee")]
        assert set(plan.without_importance) == set(quantized) - {"token_embd.weight", "output.weight"}


def test_an_importance_of_another_model_is_refused_except_for_the_embedding(tmp_path: Path) -> None:
    with GGUFFile.open(ARCEE.write(tmp_path / "source.gguf")) as file:
        plan_quantization(
            file, find_mix("Q4_K_M"), importance=Importance({"token_embd.weight": np.ones(99, np.float32)})
        )
        expected = r"blk\.0\.attn_q\.weight: importance of 99 columns, wanted 256; .* is of another model"
        with pytest.raises(FormatError, match=expected):
            plan_quantization(
                file,
                find_mix("Q4_K_M"),
                importance=Importance({"blk.0.attn_q.weight": np.ones(99, np.float32)}),
            )


def test_tensors_of_the_requested_format_are_copied(tmp_path: Path) -> None:
    source = MODELS["llama, three layers"].write(tmp_path / "source.gguf")
    first = quantize(source, "Q4_K_S")
    with GGUFFile.open(first) as file:
        plan = plan_quantization(file, find_mix("Q5_K_S"))
        again = {tensor.info.name for tensor in plan.tensors if tensor.is_requantized}
        assert "blk.0.attn_q.weight" in again
        assert "token_embd.weight" not in again  # Q6_K in both
    second = quantize(first, "Q4_K_S", processes=2)
    assert second.read_bytes() == first.read_bytes()


def test_progress_ends_with_all_bytes(tmp_path: Path) -> None:
    received: list[tuple[int, int]] = []
    with GGUFFile.open(ARCEE.write(tmp_path / "source.gguf")) as file:
        plan = plan_quantization(file, find_mix("Q8_0"))
        write_quantized(file, plan, tmp_path / "t.gguf", progress=lambda *step: received.append(step))
        assert received[-1] == (file.nbytes, file.nbytes)
    assert [done for done, _ in received] == sorted(done for done, _ in received)


def test_metadata_of_an_importance_is_added_and_an_older_one_replaced(tmp_path: Path) -> None:
    source = ARCEE.write(tmp_path / "source.gguf")
    for dataset in ("talk", "prose"):
        with GGUFFile.open(source) as file:
            plan = plan_quantization(file, find_mix("Q8_0"))
            write_quantized(file, plan, tmp_path / dataset, {"quantize.imatrix.dataset": dataset})
        source = tmp_path / dataset
    with GGUFFile.open(source) as file:
        assert file.metadata["quantize.imatrix.dataset"] == "prose"


def test_all_parts_of_a_set_become_one_file(tmp_path: Path) -> None:
    weights = np.random.default_rng(63).standard_normal((4, 256)).astype(np.float32)
    for part in range(2):
        path = tmp_path / f"m-0000{part + 1}-of-00002.gguf"
        numbers = {"split.no": np.uint16(part), "split.count": np.uint16(2), "split.tensors.count": 2}
        with GGUFWriter(path, {"general.architecture": "llama", **numbers}) as writer:
            writer.add_tensor(f"blk.{part}.ffn_up.weight", weights, "F32")
    with GGUFFile.open(quantize(tmp_path / "m-00001-of-00002.gguf", "Q8_0")) as written:
        assert len(written.tensors) == 2
        assert not [key for key in written.metadata if key.startswith("split.")]


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_weight_out_of_range_names_its_tensor_and_leaves_no_file(
    small_pieces: None, processes: int, tmp_path: Path
) -> None:
    weights = np.ones((4, 256), np.float32)
    for value, mix, message in (
        (np.inf, "Q8_0", "is inf, wanted finite weights"),
        (1e6, "F16", r"weights up to 1e\+06, wanted at most 65504 for F16"),
    ):
        weights[2, 7] = value
        with GGUFWriter(tmp_path / "source.gguf", {"general.architecture": "llama"}) as writer:
            writer.add_tensor("blk.0.ffn_up.weight", weights, "F32")
        with pytest.raises(FormatError, match=rf"tensor blk\.0\.ffn_up\.weight: .*{message}"):
            quantize(tmp_path / "source.gguf", mix, processes)
        assert [path.name for path in tmp_path.iterdir()] == ["source.gguf"]


def test_an_interrupt_ends_the_workers_and_leaves_no_file(small_pieces: None, tmp_path: Path) -> None:
    source = ARCEE.write(tmp_path / "source.gguf")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with GGUFFile.open(source) as file:
        plan = plan_quantization(file, find_mix("Q4_K_M"))
        with pytest.raises(KeyboardInterrupt):
            write_quantized(file, plan, tmp_path / "t.gguf", processes=2, progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["source.gguf"]


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_a_killed_worker_is_an_error() -> None:
    piece = Piece("w", np.ones(512, np.float32).tobytes(), "F32", "Q4_K", None)
    with EncodingPool(2) as pool:
        assert len(next(pool.recoded([lambda: piece]))) == 288
        for worker in pool.workers:
            worker.send_signal(signal.SIGKILL)
            worker.wait()
        with pytest.raises(
            WorkerError, match="tensor w: a worker process ended with code -9, wanted its result"
        ):
            next(pool.recoded([lambda: piece]))
