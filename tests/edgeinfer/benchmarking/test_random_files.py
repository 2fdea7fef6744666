"""Random files of a shape: valid, finite, written once, readable by llama.cpp."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer.benchmarking import random_files
from edgeinfer.benchmarking.bench_targets import LlamaCppTarget
from edgeinfer.benchmarking.random_blocks import FORMATS, RandomBlocks
from edgeinfer.benchmarking.random_files import random_file, vocabulary_metadata, write_random_file
from edgeinfer.errors import OutOfMemoryError
from edgeinfer.llama_cpp.context import LlamaCppContext
from edgeinfer.shapes.gemma4_layers import Gemma4Layers
from edgeinfer.shapes.known_shapes import SHAPES
from edgeinfer.shapes.shape import Shape
from edgeinfer_quant_formats import GGUFFile, decode

SMALL = Shape("small", 2, 256, 512, 4, 2, 600, 128)
QWEN3 = replace(SMALL, name="small3", architecture="qwen3", tied=True, qk_norm=True, head_dim=32)
QWEN3_EXPERTS = replace(QWEN3, name="small4", architecture="qwen3moe", experts=4, experts_per_token=2)
GEMMA4 = replace(
    SMALL,
    name="small5",
    layers=7,
    architecture="gemma4",
    tied=True,
    head_dim=128,
    gemma4=Gemma4Layers(16, 64, 2, own_caches=6, per_layer=64),
)
GEMMA4_EXPERTS = replace(
    GEMMA4,
    name="small6",
    gemma4=Gemma4Layers(16, 64, 4, values_from_keys=True),
    feed_forward=256,
    dense_feed_forward=512,
    experts=4,
    experts_per_token=2,
)
QWEN2 = replace(SMALL, name="small2", architecture="qwen2", tied=True, biases=True)
SHAPES_OF_FILES = [SMALL, QWEN2, QWEN3, QWEN3_EXPERTS, GEMMA4, GEMMA4_EXPERTS]


@pytest.mark.parametrize("name", FORMATS)
def test_random_blocks_have_the_requested_standard_deviation(name: str) -> None:
    blocks = RandomBlocks(name, 0.02, np.random.default_rng(0))
    weights = decode(blocks.take(4000).reshape(-1), name)
    assert np.isfinite(weights).all()
    assert 0.013 < weights.std() < 0.03
    assert abs(weights.mean()) < 0.0015


def test_a_stream_of_blocks_has_the_requested_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.benchmarking.random_blocks.PIECE_BYTES", 1000)
    pieces = list(RandomBlocks("Q4_0", 0.02, np.random.default_rng(0)).stream(32 * 100))
    assert sum(piece.nbytes for piece in pieces) == 1800
    assert max(piece.nbytes for piece in pieces) <= 1000


@pytest.mark.parametrize("shape", SHAPES_OF_FILES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("kind", [pytest.param("Q4_K_M", marks=pytest.mark.slow), "Q8_0"])
def test_a_random_file_loads_and_generates(tmp_path: Path, shape: Shape, kind: str) -> None:
    path = tmp_path / "random.gguf"
    write_random_file(path, shape, kind)
    with edgeinfer.load(path, context=64, draft=None) as model:
        logits = model.logits([1, 300, 5, 599])
        assert model.tokenizer.decode(model.tokenizer.encode("Abc d!")) == "Abc d!"
    assert logits.shape == (4, 600)
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 10


@pytest.mark.llama_cpp
@pytest.mark.parametrize("shape", SHAPES_OF_FILES, ids=lambda shape: shape.name)
def test_llama_cpp_gives_the_same_logits_for_a_random_file(tmp_path: Path, shape: Shape) -> None:
    pytest.importorskip("llama_cpp")
    path = tmp_path / "random.gguf"
    # Gemma 4's scores aren't divided by the size of heads: rounding changes more of the softmax.
    write_random_file(path, shape, "F32" if shape.gemma4 else "Q8_0")
    ids = [1, 300, 5, 599]
    peer = LlamaCppContext(path, 64, 1, "this test")
    theirs = peer.read_all(ids).copy()
    peer.close()
    with edgeinfer.load(path, context=64, draft=None) as model:
        ours = model.logits(ids)
    assert np.linalg.norm(ours - theirs) < 0.05 * np.linalg.norm(theirs)


@pytest.mark.llama_cpp
def test_the_llama_cpp_target_prefills_and_rewinds(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    path = tmp_path / "random.gguf"
    write_random_file(path, SMALL, "Q8_0")
    peer = LlamaCppTarget(path, 64, 1)
    for _ in range(3):
        peer.read(list(range(40)))
        peer.read_all([1, 2])
        peer.rewind(4)
    assert peer.vocabulary_size == 600
    assert "CPU" in peer.describe()
    peer.close()


def test_a_file_is_written_once_and_again_if_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "small", SMALL)
    received: list[tuple[int, int]] = []
    path = random_file(
        "small", "q4_0", lambda done, total: received.append((done, total)), tmp_path / "cache"
    )
    assert path.name == "small-Q4_0-random-3.gguf"
    assert received[-1][0] == received[-1][1]
    first = path.read_bytes()
    received.clear()
    assert (
        random_file("small", "Q4_0", lambda done, total: received.append((done, total)), path.parent) == path
    )
    assert received == []
    path.write_bytes(first[:1000])
    assert random_file("small", "Q4_0", None, path.parent).read_bytes() == first


def test_a_full_disk_is_reported_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_files, "SPARE_BYTES", 1 << 60)
    with pytest.raises(OutOfMemoryError, match=r"GiB free, the file of small takes 0\.0 GiB"):
        write_random_file(tmp_path / "random.gguf", SMALL, "Q4_0")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [259, 600, 151_936])
def test_a_vocabulary_has_distinct_tokens(size: int) -> None:
    result = vocabulary_metadata(size)
    assert len(set(result["tokenizer.ggml.tokens"])) == size
    assert len(result["tokenizer.ggml.scores"]) == len(result["tokenizer.ggml.token_type"]) == size


def test_the_file_names_its_shape(tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    write_random_file(path, SMALL, "F16")
    with GGUFFile.open(path) as file:
        assert file.metadata["general.name"] == "random weights in the shape of small"
        assert file.tensors["blk.1.ffn_down.weight"].shape == (256, 512)
