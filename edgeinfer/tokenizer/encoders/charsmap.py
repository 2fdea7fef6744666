"""SentencePiece's table of replacements (`precompiled_charsmap`), applied before encoding."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgeinfer_quant_formats.errors import FormatError

_KEY = "tokenizer.ggml.precompiled_charsmap"
MAX_KEY_BYTES = 64
MAX_REPLACEMENT_BYTES = 256
"""Of a key and of a replacement; in Unicode's normalization forms the longest have 18 and 33."""
MAX_UNITS = 1 << 20
_SIZE_BYTES, _UNIT_BYTES = 4, 4
_KEY_ENDS, _HAS_FAR_CHILDREN, _IS_VALUE = 1 << 8, 1 << 9, 1 << 31
_CACHED_STEPS = 100_000

Units = npt.NDArray[np.int64]


class _Step(NamedTuple):
    """The node after a character, and the replacement if a key ends there."""

    node: int
    replacement: str | None


class Charsmap:
    """Replaces the longest keys of a table, from left to right.

    The bytes of the table are a length, a double array (a trie over the bytes of the keys) and the
    replacements, each closed by a zero. A unit of the array has the byte that leads to it (bits 0 to 7),
    whether a key ends there (bit 8), and the distance to its children (bits 10 to 30, times 256 if bit 9 is
    set); with bit 31 it is the position of a replacement. Source: Yata et al. 2007 (double arrays); the code
    of SentencePiece and darts-clone.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """Read `tokenizer.ggml.precompiled_charsmap`, which may be missing.

        Raises:
            FormatError: the table is damaged.
        """
        data = _data_of(metadata.get(_KEY))
        size = int.from_bytes(data[:_SIZE_BYTES], "little")
        if data and not _UNIT_BYTES <= size < len(data) - _SIZE_BYTES:
            raise FormatError(f"{_KEY}: {len(data)} bytes with a double array of {size} bytes; it is damaged")
        if size > MAX_UNITS * _UNIT_BYTES:
            raise FormatError(f"{_KEY}: a double array of {size} bytes, wanted at most {MAX_UNITS} units")
        units = np.frombuffer(data, "<u4", size // _UNIT_BYTES if data else 0, _SIZE_BYTES if data else 0)
        self._units: list[int] = units.tolist()
        self._replacements = _replacements(units.astype(np.int64), data[_SIZE_BYTES + size :]) if data else {}
        self._root = _distance(self._units[0]) if data else 0
        self._steps: dict[tuple[int, str], _Step | None] = {}

    def apply(self, text: str) -> str:
        """Return `text` with each key replaced; replacements are not searched again."""
        if not self._replacements:
            return text
        parts: list[str] = []
        position = 0
        while position < len(text):
            node, end = self._root, position
            part = text[position]
            following = position + 1
            while end < len(text) and (step := self._step(node, text[end])) is not None:
                node, end = step.node, end + 1
                if step.replacement is not None:
                    part, following = step.replacement, end
            parts.append(part)
            position = following
        return "".join(parts)

    def _step(self, node: int, character: str) -> _Step | None:
        """Return the node after `character` at a node, or None if no key continues with it."""
        key = (node, character)
        if key in self._steps:
            return self._steps[key]
        if len(self._steps) >= _CACHED_STEPS:
            self._steps.clear()
        step = self._steps[key] = self._walked(node, character)
        return step

    def _walked(self, node: int, character: str) -> _Step | None:
        units = self._units
        unit = 0
        for byte in character.encode("utf-8"):
            child = node ^ byte
            if byte == 0 or child >= len(units) or units[child] & (_IS_VALUE | 0xFF) != byte:
                return None
            unit = units[child]
            node = child ^ _distance(unit)
        ends = unit & _KEY_ENDS
        return _Step(node, self._replacements[units[node] & ~_IS_VALUE] if ends else None)


def _data_of(values: Any) -> bytes:
    if values is None:
        return b""
    numbers = np.asarray(values)
    if numbers.size and (numbers.ndim != 1 or numbers.dtype not in (np.int8, np.uint8)):
        raise FormatError(f"{_KEY}: {numbers.size} values of type {numbers.dtype}; wanted bytes")
    return numbers.tobytes()


def _distance(unit: int) -> int:
    """Return the distance from a unit to its children; two positions differ by it as by XOR."""
    return (unit >> 10 & 0x3FFFFF) << (8 if unit & _HAS_FAR_CHILDREN else 0)


def _replacements(units: Units, texts: bytes) -> dict[int, str]:
    """Return the replacements by position, after a check of everything that a text can reach.

    Each unit can be reached from one node only: its position without the byte that leads to it.
    """
    bytes_before = units & (_IS_VALUE | 0xFF)
    usable = np.flatnonzero((bytes_before > 0) & (bytes_before < _IS_VALUE))
    usable = usable[np.argsort(usable ^ bytes_before[usable], kind="stable")]
    parents = usable ^ bytes_before[usable]
    far = np.where(units[usable] & _HAS_FAR_CHILDREN, 8, 0)
    nodes = usable ^ ((units[usable] >> 10) << far)
    level = np.array([_distance(int(units[0]))])
    offsets: set[int] = set()
    for _ in range(MAX_KEY_BYTES):
        first, last = np.searchsorted(parents, level, "left"), np.searchsorted(parents, level, "right")
        counts = last - first
        edges = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        if not edges.size:
            return {offset: _replacement(texts, offset) for offset in offsets}
        level = np.unique(nodes[edges])
        if level[-1] >= len(units):
            raise FormatError(f"{_KEY}: a node beyond the {len(units)} units of its double array")
        ends = nodes[edges][units[usable[edges]] & _KEY_ENDS > 0]
        offsets.update((units[np.unique(ends)] & ~_IS_VALUE).tolist())
    raise FormatError(f"{_KEY}: keys of more than {MAX_KEY_BYTES} bytes, or a cycle in its double array")


def _replacement(texts: bytes, offset: int) -> str:
    end = texts.find(b"\0", offset, offset + MAX_REPLACEMENT_BYTES + 1)
    if end < 0:
        raise FormatError(
            f"{_KEY}: a replacement at byte {offset} of {len(texts)} has no end within "
            f"{MAX_REPLACEMENT_BYTES} bytes"
        )
    data = texts[offset:end]
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise FormatError(f"{_KEY}: the replacement {data[:8].hex(' ')} is not UTF-8") from None
