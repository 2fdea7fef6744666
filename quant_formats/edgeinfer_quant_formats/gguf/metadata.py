"""The metadata of a GGUF file: checked when the file is opened, decoded when a key is read."""

import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgeinfer_quant_formats.errors import FormatError, printable
from edgeinfer_quant_formats.gguf.cursor import Cursor
from edgeinfer_quant_formats.gguf.value_types import SCALAR_DTYPES, ValueType

MAX_KEYS = 65536
SMALLEST_ENTRY_BYTES = 8 + 4 + 1
# Memory that decoding one key may take beyond the size of its file, and an upper bound for Python objects: a
# str object with its list entry, and four bytes per byte of text outside Latin-1.
SPARE_BYTES = 64 << 20
STRING_OBJECT_BYTES = 88
TEXT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Entry:
    """The location of a value; `count` is None for a scalar."""

    type: ValueType
    offset: int
    count: int | None
    nbytes: int


class Metadata(Mapping[str, Any]):
    """The key-value pairs of one file, in file order.

    Integers, floats, bools and strings are returned as Python values, arrays of numbers as numpy arrays,
    arrays of strings as lists. Invalid UTF-8 is kept as surrogates (PEP 383).
    """

    def __init__(self, data: Any, entries: dict[str, Entry]) -> None:
        self._data = data
        self._entries = entries
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            entry = self._entries[key]
            if getattr(self._data, "closed", False):
                raise FormatError(f"metadata key {printable(key)}: the file is closed, wanted an open one")
            self._values[key] = decode_entry(self._data, entry)
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def type_of(self, key: str) -> ValueType:
        """The type of a value; for an array, the type of its elements."""
        return self._entries[key].type

    def is_array(self, key: str) -> bool:
        return self._entries[key].count is not None

    def without(self, keys: Collection[str]) -> "Metadata":
        """The same metadata without some keys."""
        return Metadata(self._data, {key: entry for key, entry in self._entries.items() if key not in keys})

    def encoded(self, key: str) -> bytes:
        """Type and value as encoded in the file, so that a copy keeps the width of every number."""
        entry = self._entries[key]
        value: bytes = self._data[entry.offset : entry.offset + entry.nbytes]
        if entry.count is not None:
            return struct.pack("<IIQ", ValueType.ARRAY, entry.type, entry.count) + value
        if entry.type is ValueType.STRING:
            return struct.pack("<IQ", entry.type, entry.nbytes) + value
        return struct.pack("<I", entry.type) + value


def read_metadata(cursor: Cursor, count: int) -> Metadata:
    """Read `count` keys at the cursor and check the bounds of every value, without decoding.

    Raises:
        FormatError: a value beyond the end of the file, an unknown type, a nested array, a duplicate key.
    """
    room = min(MAX_KEYS, (cursor.end - cursor.position) // SMALLEST_ENTRY_BYTES)
    if count > room:
        raise cursor.error(f"{count} metadata keys, wanted at most {room}")
    entries: dict[str, Entry] = {}
    for index in range(count):
        cursor.location = f"metadata key {index} of {count}"
        key = cursor.name("key")
        cursor.location = f"metadata key {printable(key)}"
        if key in entries:
            raise cursor.error("duplicate key")
        entries[key] = _read_entry(cursor)
    cursor.location = "header"
    return Metadata(cursor.data, entries)


def _read_entry(cursor: Cursor) -> Entry:
    kind = _value_type(cursor, cursor.uint32("value type"))
    if kind is ValueType.ARRAY:
        return _read_array(cursor)
    if kind is ValueType.STRING:
        length = cursor.uint64("length of the string")
        _check_decoded_size(cursor, 1, length)
        return Entry(kind, cursor.take(length, "string"), None, length)
    size = SCALAR_DTYPES[kind].itemsize
    entry = Entry(kind, cursor.take(size, f"{kind.name.lower()} value"), None, size)
    if kind is ValueType.BOOL:
        _check_bools(cursor, entry)
    return entry


def _read_array(cursor: Cursor) -> Entry:
    kind = _value_type(cursor, cursor.uint32("array element type"))
    if kind is ValueType.ARRAY:
        raise cursor.error("array of arrays, wanted an array of numbers, bools or strings")
    count = cursor.uint64("array length")
    start = cursor.position
    if kind is ValueType.STRING:
        text_bytes = cursor.skip_strings(count)
        _check_decoded_size(cursor, count, text_bytes)
        return Entry(kind, start, count, cursor.position - start)
    size = count * SCALAR_DTYPES[kind].itemsize
    entry = Entry(kind, cursor.take(size, f"array of {count} {kind.name.lower()} values"), count, size)
    if kind is ValueType.BOOL:
        _check_bools(cursor, entry)
    return entry


def _value_type(cursor: Cursor, number: int) -> ValueType:
    try:
        return ValueType(number)
    except ValueError:
        raise cursor.error(f"value type {number}, wanted 0 to {max(ValueType)}") from None


def _check_decoded_size(cursor: Cursor, count: int, text_bytes: int) -> None:
    decoded = count * STRING_OBJECT_BYTES + text_bytes * TEXT_BYTES
    if text_bytes <= cursor.end and decoded > cursor.end + SPARE_BYTES:
        raise cursor.error(
            f"{count} strings of {text_bytes} bytes may take {decoded} bytes of memory, "
            f"wanted at most {cursor.end + SPARE_BYTES} (the file's size + 64 MiB)"
        )


def _check_bools(cursor: Cursor, entry: Entry) -> None:
    values = np.frombuffer(cursor.data, np.uint8, entry.nbytes, entry.offset)
    if entry.nbytes and values.max() > 1:
        raise cursor.error(f"bool of value {values.max()}, wanted 0 or 1")


def decode_entry(data: Any, entry: Entry) -> Any:
    """The Python value of an entry from `read_metadata`."""
    if entry.type is ValueType.STRING:
        if entry.count is not None:
            return _decode_strings(data, entry)
        return data[entry.offset : entry.offset + entry.nbytes].decode("utf-8", "surrogateescape")
    dtype = SCALAR_DTYPES[entry.type]
    if entry.count is None:
        return np.frombuffer(data, dtype, 1, entry.offset)[0].item()
    # A copy: a view would keep the map open, and be unaligned.
    return np.frombuffer(data, dtype, entry.count, entry.offset).astype(dtype.newbyteorder("="))


def _decode_strings(data: Any, entry: Entry) -> list[str]:
    block: bytes = data[entry.offset : entry.offset + entry.nbytes]
    try:
        return [text.decode() for text in _split_strings(block, entry.count or 0)]
    except UnicodeDecodeError:
        return [text.decode("utf-8", "surrogateescape") for text in _split_strings(block, entry.count or 0)]


def _split_strings(block: bytes, count: int) -> Iterator[bytes]:
    unpack, position = struct.Struct("<Q").unpack_from, 0
    for _ in range(count):
        start = position + 8
        position = start + unpack(block, position)[0]
        yield block[start:position]
