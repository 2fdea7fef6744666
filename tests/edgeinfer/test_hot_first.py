"""`quantize --hot-first`: neurons in the order of the profile, the same function, a standard file."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer.errors import SettingError
from edgeinfer.profiling.profiling import profile
from edgeinfer_offload.runtime.activity_profile import find_profile
from edgeinfer_quant_formats import FormatError, GGUFFile
from edgeinfer_quant_formats.quantizer.neuron_order import ReorderedFile, hottest_first, neurons_per_block
from tests.model_zoo import ZOO

TEXT = "the heron ate in the rain on a stone " * 30
IDS = list(range(3, 43))


@pytest.fixture(autouse=True)
def _own_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def profiled(tmp_path: Path, name: str, **changes: object) -> tuple[Path, Path, edgeinfer.Quantization]:
    """A profiled model, and the same with hot neurons first."""
    source = replace(ZOO[name], **changes).write(tmp_path / f"{name}.gguf")  # type: ignore[arg-type]
    profile(source, [TEXT], tokens=200)
    target = tmp_path / "hot.gguf"
    return source, target, edgeinfer.quantize(source, target, hot_first=True)


def logits(path: Path) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    with edgeinfer.load(path, device="cpu", threads=1, sparse="off") as model:
        return model.logits(IDS)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    ("name", "formats", "block"),
    [("arcee", ("F32",), 1), ("arcee", ("Q8_0",), 32), ("starcoder2", ("F16",), 1), ("phi3", ("Q8_0",), 32)],
)
def test_reordering_does_not_change_the_function(
    tmp_path: Path, name: str, formats: tuple[str, ...], block: int
) -> None:
    source, target, done = profiled(tmp_path, name, formats=formats)
    expected, actual = logits(source), logits(target)
    # Sums are rounded in another order; int8 activations after them may round differently.
    assert np.linalg.norm(actual - expected) < (1e-5 if block == 1 else 2e-2) * np.linalg.norm(expected)
    assert (f"whole blocks of {block}," in done.warnings[0]) == (block > 1)
    with GGUFFile.open(source) as before, GGUFFile.open(target) as after:
        assert {n: (i.shape, i.format) for n, i in before.tensors.items()} == {
            n: (i.shape, i.format) for n, i in after.tensors.items()
        }
        down = "blk.0.ffn_down.weight"
        assert not np.array_equal(before.raw(down), after.raw(down))


def test_the_hottest_neurons_come_first_and_the_profile_is_reordered(tmp_path: Path) -> None:
    source, target, _ = profiled(tmp_path, "arcee", formats=("F16",))
    before, after = find_profile(source, tmp_path), find_profile(target, tmp_path)
    assert before is not None
    assert after is not None
    counts = after.counts["neurons.0"].sum(axis=0).astype(np.int64)
    assert (np.diff(counts) <= 0).all()
    assert sorted(counts) == sorted(before.counts["neurons.0"].sum(axis=0))
    again = profile(target, [TEXT], tokens=200)
    moved = np.abs(again.profile.counts["neurons.0"].sum(axis=0).astype(np.int64) - counts)
    assert moved.max() <= 2  # neurons at their threshold, whose sums round differently


@pytest.mark.slow
def test_float_files_are_reordered_and_quantized_at_once(tmp_path: Path) -> None:
    source, target, _ = profiled(tmp_path, "arcee", formats=("F16",), width=256, feed_forward=256)
    edgeinfer.quantize(source, target, "Q8_0", hot_first=True, overwrite=True)
    with GGUFFile.open(target) as file:
        assert file.tensors["blk.0.ffn_down.weight"].format.name == "Q8_0"
    plain = tmp_path / "plain.gguf"
    edgeinfer.quantize(source, plain, "Q8_0")
    expected = logits(source)
    errors = [np.linalg.norm(logits(path) - expected) for path in (target, plain)]
    assert 0 < errors[0] < 1.3 * errors[1]


@pytest.mark.llama_cpp
@pytest.mark.parametrize("formats", [("F32",), ("Q8_0",)])
def test_llama_cpp_reads_the_file_and_agrees(tmp_path: Path, formats: tuple[str, ...]) -> None:
    pytest.importorskip("llama_cpp")
    from edgeinfer.llama_cpp.context import LlamaCppContext

    source, target, _ = profiled(tmp_path, "arcee", formats=formats)
    result = []
    for path in (source, target):
        peer = LlamaCppContext(path, 64, 1, "test", "f16")
        result.append(np.array(peer.read_all(IDS)))
        peer.close()
    scale = np.abs(result[0]).max()
    assert np.abs(result[1] - result[0]).max() < (1e-3 if formats == ("F32",) else 5e-3) * scale


def test_without_a_profile_the_error_names_the_command(tmp_path: Path) -> None:
    source = ZOO["arcee"].write(tmp_path / "m.gguf")
    with pytest.raises(SettingError, match="it has no activity profile; create one with edgeinfer profile"):
        edgeinfer.quantize(source, tmp_path / "hot.gguf", hot_first=True)


def test_orders_move_whole_blocks_and_must_be_permutations(tmp_path: Path) -> None:
    counts = np.array([1, 2, 9, 9, 5, 5])
    assert hottest_first(counts, 1).tolist() == [2, 3, 4, 5, 1, 0]
    assert hottest_first(counts, 2).tolist() == [2, 3, 4, 5, 0, 1]
    with GGUFFile.open(ZOO["arcee"].write(tmp_path / "m.gguf")) as file:
        assert neurons_per_block(file, 0) == 1
        with pytest.raises(FormatError, match=r"no blk\.9\.ffn_down\.weight; only dense feed-forwards"):
            neurons_per_block(file, 9)
        with pytest.raises(FormatError, match="order of 96 neurons for layer 0, wanted each of its 96 once"):
            ReorderedFile(file, {0: np.zeros(96, np.int64)})
