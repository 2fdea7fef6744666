"""The total length of a GGUF file, computed from its header."""

import struct

from edgeinfer_quant_formats.errors import FormatError, UnsupportedTypeError
from edgeinfer_quant_formats.gguf.cursor import Cursor
from edgeinfer_quant_formats.gguf.file_part import read_alignment, read_header
from edgeinfer_quant_formats.gguf.metadata import read_metadata
from edgeinfer_quant_formats.gguf.tensor_index import read_tensor_table


def declared_bytes(head: bytes, name: str) -> int | None:
    """Bytes of the whole file, with the padding of its last tensor, from its first bytes `head`.

    None: the header does not end within `head`, or is damaged.

    Raises:
        UnsupportedTypeError: a tensor has a type that is not supported.
    """
    cursor = Cursor(head, name)
    try:
        _, tensor_count, key_count = read_header(cursor)
        metadata = read_metadata(cursor, key_count)
        alignment = read_alignment(cursor, metadata)
        cursor.end = 1 << 63  # tensors may end anywhere
        tensors = read_tensor_table(cursor, tensor_count, alignment, 0)
    except UnsupportedTypeError:
        raise
    except (FormatError, struct.error):
        return None
    if cursor.position > len(head):
        return None
    end = max((info.offset + info.nbytes for info in tensors.values()), default=cursor.position)
    return -(-end // alignment) * alignment
