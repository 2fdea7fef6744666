"""GGUF files built byte by byte, valid or deliberately invalid, for the tests of the reader."""

import struct
from dataclasses import dataclass, field

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)


def string(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def uint32(value: int) -> bytes:
    return struct.pack("<I", value)


def uint64(value: int) -> bytes:
    return struct.pack("<Q", value)


def array(element_type: int, count: int, payload: bytes) -> bytes:
    return struct.pack("<IQ", element_type, count) + payload


@dataclass
class RawTensor:
    """One record of the tensor table; dims in the order of the file (columns first)."""

    name: str | bytes = "weight"
    dims: tuple[int, ...] = (8,)
    type: int = 0
    offset: int = 0
    dimensions: int | None = None


@dataclass
class RawGGUF:
    """The parts of a file; counts are right unless given."""

    keys: list[tuple[str | bytes, int, bytes]] = field(default_factory=list)
    tensors: list[RawTensor] = field(default_factory=list)
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: int = 3
    key_count: int | None = None
    tensor_count: int | None = None
    alignment: int = 32
    # Integers that give lengths or offsets: (offset, bytes).
    fields: list[tuple[int, int]] = field(default_factory=list)

    def build(self) -> bytes:
        self.fields = [(4, 4), (8, 8), (16, 8)]
        out = bytearray(self.magic + uint32(self.version))
        out += uint64(len(self.tensors) if self.tensor_count is None else self.tensor_count)
        out += uint64(len(self.keys) if self.key_count is None else self.key_count)
        for key, kind, payload in self.keys:
            self.fields.append((len(out), 8))
            out += string(key)
            self.fields.append((len(out), 4))
            out += uint32(kind)
            if kind in (STRING, ARRAY):
                self.fields.append((len(out) + (4 if kind == ARRAY else 0), 8))
            out += payload
        for tensor in self.tensors:
            self._add_record(out, tensor)
        out += bytes(-len(out) % self.alignment)
        return bytes(out + self.data)

    def _add_record(self, out: bytearray, tensor: RawTensor) -> None:
        self.fields.append((len(out), 8))
        out += string(tensor.name)
        self.fields.append((len(out), 4))
        out += uint32(len(tensor.dims) if tensor.dimensions is None else tensor.dimensions)
        for dim in tensor.dims:
            self.fields.append((len(out), 8))
            out += uint64(dim)
        self.fields += [(len(out), 4), (len(out) + 4, 8)]
        out += uint32(tensor.type) + uint64(tensor.offset)
