"""One GGUF file as a memory map: the header is read and checked, tensor bytes are not."""

from pathlib import Path

from edgeinfer_quant_formats.gguf.cursor import Cursor
from edgeinfer_quant_formats.gguf.metadata import Metadata, read_metadata
from edgeinfer_quant_formats.gguf.tensor_index import TensorInfo, read_tensor_table
from edgeinfer_quant_formats.gguf.value_types import (
    DEFAULT_ALIGNMENT,
    MAGIC,
    POWERINFER_MAGIC,
    VERSIONS,
    ValueType,
)
from edgeinfer_quant_formats.mapped_file import MappedFile

HEADER_BYTES = 4 + 4 + 8 + 8
ALIGNMENT_KEY = "general.alignment"


class FilePart(MappedFile):
    """One mapped file: its version, alignment, metadata and tensor table.

    Raises:
        FormatError: the file is damaged, or not a GGUF file of version 2 or 3.
        OSError: the file can't be opened.
    """

    def __init__(self, path: Path, part: int = 0, *, unknown_types: bool = False) -> None:
        super().__init__(path, HEADER_BYTES, "GGUF")
        cursor = Cursor(self.data, str(path))
        try:
            self.version, tensor_count, key_count = read_header(cursor)
            self.metadata: Metadata = read_metadata(cursor, key_count)
            self.alignment = read_alignment(cursor, self.metadata)
            self.tensors: dict[str, TensorInfo] = read_tensor_table(
                cursor, tensor_count, self.alignment, part, unknown_types=unknown_types
            )
        except BaseException:
            self.close()
            raise


def read_header(cursor: Cursor) -> tuple[int, int, int]:
    """Version, number of tensors and number of metadata keys. Raises `FormatError`."""
    magic = cursor.data[: len(MAGIC)]
    cursor.take(len(MAGIC), "magic")
    if magic not in (MAGIC, POWERINFER_MAGIC):
        raise cursor.error(f"magic {magic!r}, wanted {MAGIC!r}: not a GGUF file")
    version = cursor.uint32("version")
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in VERSIONS and 1 <= swapped <= max(VERSIONS):
        raise cursor.error(f"big-endian GGUF of version {swapped}, wanted little-endian")
    if version == 1:
        raise cursor.error(
            "GGUF version 1, wanted 2 or 3: version 1 counts in 32 bits; convert the model again"
        )
    if version not in VERSIONS:
        raise cursor.error(f"GGUF version {version}, wanted 2 or 3")
    return version, cursor.uint64("tensor count"), cursor.uint64("metadata key count")


def read_alignment(cursor: Cursor, metadata: Metadata) -> int:
    """The alignment of tensors. Raises `FormatError`."""
    if ALIGNMENT_KEY not in metadata:
        return DEFAULT_ALIGNMENT
    kind = metadata.type_of(ALIGNMENT_KEY)
    if metadata.is_array(ALIGNMENT_KEY) or kind is not ValueType.UINT32:
        seen = f"array of {kind.name}" if metadata.is_array(ALIGNMENT_KEY) else kind.name
        raise cursor.error(f"{ALIGNMENT_KEY} of type {seen}, wanted UINT32")
    alignment: int = metadata[ALIGNMENT_KEY]
    if alignment < 1 or alignment & (alignment - 1):
        raise cursor.error(f"{ALIGNMENT_KEY} {alignment}, wanted a power of two")
    return alignment
