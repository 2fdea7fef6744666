"""Importance matrices: both formats, and files that are damaged or something else."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer_quant_formats import FormatError, GGUFWriter
from edgeinfer_quant_formats.quantizer.importance_file import read_importance

SUMS = np.array([[2, 4, 6], [1, 1, 1]], np.float32)


def write_gguf(path: Path, counts: NDArray[Any], sums: NDArray[Any] = SUMS, **metadata: Any) -> Path:
    with GGUFWriter(path, {f"imatrix.{key}": value for key, value in metadata.items()}) as writer:
        writer.add_tensor("blk.0.ffn_up.weight.in_sum2", sums, "F32")
        writer.add_tensor("blk.0.ffn_up.weight.counts", counts, "F32")
    return path


def legacy(*entries: tuple[bytes, int, list[float]], tail: bytes = b"") -> bytes:
    out = struct.pack("<i", len(entries))
    for name, calls, sums in entries:
        out += struct.pack("<i", len(name)) + name + struct.pack("<ii", calls, len(sums))
        out += np.array(sums, "<f4").tobytes()
    return out + tail


def test_sums_are_divided_by_the_counts_of_their_matrix(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", np.array([[2], [4]], np.float32), datasets=["talk", "more"], chunk_count=7
    )
    result = read_importance(path)
    np.testing.assert_array_equal(result.tensors["blk.0.ffn_up.weight"], [1, 2, 3, 0.25, 0.25, 0.25])
    assert (result.chunks, result.dataset) == (7, "talk")


def test_an_unused_expert_has_uniform_importance(tmp_path: Path) -> None:
    result = read_importance(write_gguf(tmp_path / "m.gguf", np.array([[0], [1]], np.float32)))
    np.testing.assert_array_equal(result.tensors["blk.0.ffn_up.weight"], [1, 1, 1, 1, 1, 1])
    assert (result.chunks, result.dataset) == (0, "")


def test_the_older_format_is_read_with_its_chunks_and_data_set(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    path.write_bytes(
        legacy((b"a.weight", 2, [2, 4]), (b"b.weight", 0, [3]), tail=struct.pack("<ii", 9, 4) + b"talk")
    )
    result = read_importance(path)
    np.testing.assert_array_equal(result.tensors["a.weight"], [1, 2])
    np.testing.assert_array_equal(result.tensors["b.weight"], [3])
    assert (result.chunks, result.dataset) == (9, "talk")


def test_the_older_format_may_end_after_its_entries_or_its_chunks(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    for tail, chunks in ((b"", 0), (struct.pack("<i", 5), 5)):
        path.write_bytes(legacy((b"a", 1, [1]), tail=tail))
        assert read_importance(path).chunks == chunks


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "importance matrix: start: count of entries takes 4 bytes, wanted at most 0"),
        (struct.pack("<i", 0), "count of entries 0, wanted at least 1"),
        (struct.pack("<ii", 1, -3), "length of the name -3, wanted at least 1"),
        (struct.pack("<ii", 1, 1 << 30), "name of 1073741824 bytes, wanted at most 65535"),
        (legacy((b"a", 1, [1, 2]))[:-1], "a: values takes 8 bytes, wanted at most 7, which are left"),
        (legacy((b"a", 1, [])), "a: count of values 0, wanted at least 1"),
        (legacy((b"a", 1, [np.nan])), "a: importance from nan to nan, wanted finite numbers of at least 0"),
        (legacy((b"a", 1, [-1, 1])), "a: importance from -1.0 to 1.0, wanted finite numbers of at least 0"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "imatrix.dat"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=message):
        read_importance(path)


def test_a_model_is_refused_as_importance_matrix(tmp_path: Path) -> None:
    with GGUFWriter(tmp_path / "model.gguf") as writer:
        writer.add_tensor("w", SUMS, "F32")
    with pytest.raises(
        FormatError, match=r"no tensor called \.\.\.\.in_sum2 among its 1, wanted an importance"
    ):
        read_importance(tmp_path / "model.gguf")


def test_counts_that_do_not_fit_the_sums_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="6 sums and 4 counts"):
        read_importance(write_gguf(tmp_path / "m.gguf", np.ones((4, 1), np.float32)))
    with pytest.raises(FormatError, match=r"imatrix\.chunk_count many, wanted a whole number"):
        read_importance(write_gguf(tmp_path / "n.gguf", np.ones((2, 1), np.float32), chunk_count="many"))
