"""Writes `precompiled_charsmap`: a table of replacements as a double array, as SentencePiece stores it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Trie = dict[int, Any]
_BLOCK = 256
END = 0
"""The byte after a key; its unit has the position of the replacement."""


def charsmap(table: Mapping[str, str]) -> npt.NDArray[np.uint8]:
    """Return the bytes for a table of replacements."""
    trie: Trie = {}
    texts = b""
    for key, replacement in sorted(table.items()):
        node = trie
        for byte in key.encode():
            node = node.setdefault(byte, {})
        node[END] = len(texts)
        texts += replacement.encode() + b"\0"
    return packed(double_array(trie), texts)


def packed(units: npt.NDArray[np.uint32], texts: bytes) -> npt.NDArray[np.uint8]:
    """Return the bytes for units of a double array and the replacements after it."""
    data = units.astype("<u4").tobytes()
    return np.frombuffer(len(data).to_bytes(4, "little") + data + texts, np.uint8)


def double_array(trie: Trie) -> npt.NDArray[np.uint32]:
    """Return the units: each node's children have the first distance at which all of them are unused."""
    units = np.zeros(1 << 16, np.uint32)
    used, taken = {0}, {0}
    pending = [(trie, 0)]
    while pending:
        node, unit = pending.pop()
        start = next(
            start
            for start in range(1, len(units))
            if start not in taken and not any(start ^ byte in used for byte in node)
        )
        taken.add(start)
        used.update(start ^ byte for byte in node)
        units[unit] |= (unit ^ start) << 10 | (END in node) << 8
        for byte, child in node.items():
            if byte == END:
                units[start] = child | 1 << 31
            else:
                units[start ^ byte] = byte
                pending.append((child, start ^ byte))
    return units[: (max(used) // _BLOCK + 1) * _BLOCK]
