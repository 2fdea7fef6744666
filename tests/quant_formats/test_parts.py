"""Models in several files: any part opens the set, and an inconsistent set is refused."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from edgeinfer_quant_formats import FormatError, GGUFFile, GGUFWriter


def write_set(folder: Path, count: int = 3, changes: dict[int, dict[str, Any]] | None = None) -> list[Path]:
    """Parts with one tensor each; `changes` sets other metadata in a part, None removes a key."""
    paths = []
    for index in range(count):
        path = folder / f"model-{index + 1:05d}-of-{count:05d}.gguf"
        metadata: dict[str, Any] = {"general.name": "whole"} if index == 0 else {}
        metadata |= {"split.no": np.uint16(index), "split.count": np.uint16(count)}
        metadata["split.tensors.count"] = np.int32(count)
        metadata |= (changes or {}).get(index, {})
        with GGUFWriter(path, {key: value for key, value in metadata.items() if value is not None}) as writer:
            writer.add_tensor(f"blk.{index}", np.full((2, 32), index, np.float32), "Q8_0")
        paths.append(path)
    return paths


def test_any_part_opens_the_whole_set(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    for path in paths:
        with GGUFFile.open(path) as file:
            assert file.parts == tuple(paths)
            assert file.path == paths[0]
            assert [info.part for info in file.tensors.values()] == [0, 1, 2]
            assert dict(file.metadata) == {"general.name": "whole"}
            assert file.nbytes == 3 * 2 * 34
            for index in range(3):
                np.testing.assert_allclose(file.decode(f"blk.{index}"), index, rtol=1e-3)
                file.release(f"blk.{index}")


def test_a_set_of_gguf_py_opens(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=2)
    for index in range(5):
        writer.add_tensor(f"blk.{index}", np.full((2, 3), index, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile.open(tmp_path / "model-00002-of-00003.gguf") as file:
        assert list(file.tensors) == [f"blk.{index}" for index in range(5)]
        assert file.metadata["general.architecture"] == "llama"
        np.testing.assert_array_equal(file.decode("blk.4"), np.full((2, 3), 4))


def test_a_set_of_one_is_a_file_like_any_other(tmp_path: Path) -> None:
    write_set(tmp_path, 1)[0].rename(tmp_path / "model.gguf")
    with GGUFFile.open(tmp_path / "model.gguf") as file:
        assert len(file.parts) == 1


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    paths[1].unlink()
    with pytest.raises(
        FormatError, match=r"model-00002-of-00003\.gguf: missing, wanted all 3 parts of the set"
    ):
        GGUFFile.open(paths[2])


def test_a_renamed_part_names_the_expected_file(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    renamed = paths[0].rename(tmp_path / "model.gguf")
    message = r"model\.gguf: split\.count 3, wanted a file name that ends in -00001-of-00003\.gguf"
    with pytest.raises(FormatError, match=message):
        GGUFFile.open(renamed)
    swapped = paths[1].rename(tmp_path / "model-00001-of-00003.gguf")
    message = r"holds part 2 of 3, wanted the file name model-00002-of-00003\.gguf"
    with pytest.raises(FormatError, match=message):
        GGUFFile.open(swapped)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("split.count", np.uint16(0), "split.count 0, wanted 1 to 99999"),
        ("split.count", np.uint64(2**63), "split.count 9223372036854775808, wanted 1 to 99999"),
        ("split.count", np.int32(-3), "split.count -3, wanted 1 to 99999"),
        ("split.count", "three", "split.count 'three', wanted 1 to 99999"),
        ("split.count", True, "split.count True, wanted 1 to 99999"),
        ("split.count", np.float32("nan"), "split.count nan, wanted 1 to 99999"),
        ("split.count", [1, 2], "split.count array(.*), wanted 1 to 99999"),
        ("split.count", np.uint16(9999), "holds part 1 of 9999, wanted the file name model-00001-of-09999"),
        ("split.no", np.uint16(3), "split.no 3, wanted 0 to 2"),
        ("split.no", np.int64(-1), "split.no -1, wanted 0 to 2"),
        ("split.no", None, "split.no missing, wanted 0 to 2"),
        ("split.tensors.count", np.int32(4), "the 3 parts hold 3 tensors, wanted 4"),
        ("split.tensors.count", np.int32(-1), "split.tensors.count -1, wanted 0 to"),
    ],
)
def test_inconsistent_part_numbers_are_quoted(tmp_path: Path, key: str, value: Any, message: str) -> None:
    paths = write_set(tmp_path, changes={0: {key: value}})
    with pytest.raises(FormatError, match=rf"model-00001-of-00003\.gguf: {message}"):
        GGUFFile.open(paths[0])


def test_a_part_of_another_set_is_refused(tmp_path: Path) -> None:
    paths = write_set(tmp_path, changes={1: {"split.count": np.uint16(4)}})
    with pytest.raises(FormatError, match=r"model-00002-of-00003\.gguf: split\.count 4, wanted 3"):
        GGUFFile.open(paths[0])
    paths = write_set(tmp_path, changes={1: {"split.no": np.uint16(2)}})
    with pytest.raises(FormatError, match=r"model-00002-of-00003\.gguf: split\.no 2, wanted 1"):
        GGUFFile.open(paths[0])


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    metadata = {"split.no": np.uint16(2), "split.count": np.uint16(3)}
    with GGUFWriter(paths[2], metadata) as writer:
        writer.add_tensor("blk.0", np.zeros(32, np.float32), "F32")
    message = r"00003-of-00003\.gguf: tensor blk\.0 is in model-00001-of-00003\.gguf too"
    with pytest.raises(FormatError, match=message):
        GGUFFile.open(paths[0])


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    paths[1].write_bytes(paths[1].read_bytes()[:100])
    with pytest.raises(FormatError, match=r"model-00002-of-00003\.gguf: "):
        GGUFFile.open(paths[0])
