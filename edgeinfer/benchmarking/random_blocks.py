"""Random bytes that are valid blocks: random quants, and scales that give the weights a chosen spread."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from edgeinfer_quant_formats import FORMATS as SPECS
from edgeinfer_quant_formats import FormatSpec, block_format, decode
from edgeinfer_quant_formats.codecs.decoding import half_of_e4m3

Bytes = npt.NDArray[np.uint8]

PIECE_BYTES = 8 << 20
SAMPLE_BLOCKS = 2048

# Random signs and fractions with one exponent: dtype, bits kept, fraction bits, exponent bias.
_FLOATS = {
    "F16": ("<u2", 0x83FF, 10, 15),
    "BF16": ("<u2", 0x807F, 7, 127),
    "F32": ("<u4", 0x807FFFFF, 23, 127),
}
FORMATS = (*_FLOATS, *(name for name, spec in SPECS.items() if spec.is_quantized))


def _scale_offsets(spec: FormatSpec) -> dict[int, float]:
    """The float16 scales of a block: byte offset -> value relative to the first. A minimum is set so that the
    mean weight is zero.
    """
    if spec.name == "IQ1_M":
        return {spec.field("scales").offset: 1.0}
    middle = sum(spec.level_range) / 2
    relative = {"d": 1.0, "m": -middle, "dmin": middle}
    return {field.offset: relative[field.name] for field in spec.fields if field.dtype == "f16"}


def _has_uneven_levels(spec: FormatSpec) -> bool:
    """Whether levels reach farther below zero than above: half of the blocks then get a negative scale.

    A nonzero mean, however small, grows with every matrix until the hidden states of all tokens are nearly
    equal.
    """
    return spec.scale_dtype == "f16" and not spec.has_minimum and not spec.signed


class RandomBlocks:
    """Blocks of one format whose weights have about the standard deviation `spread`.

    Raises `KeyError` for a format that is not supported.
    """

    def __init__(self, name: str, spread: float, random: np.random.Generator) -> None:
        self.format: FormatSpec = block_format(name)
        self._random = random
        self._patch: list[tuple[int, bytes]] = []
        if name in _FLOATS:
            self._exponent = round(np.log2(spread / 1.53))
        elif self.format.scale_dtype == "e8m0":
            exponent = round(128 + np.log2(spread / self._measured([(0, b"\x80")])))
            self._patch = [(0, bytes([min(max(exponent, 0), 254)]))]
        elif self.format.scale_dtype == "e4m3":
            count, scales = self.format.fields[0].count, half_of_e4m3(np.arange(127, dtype=np.uint8))
            of_one = self._measured([(0, b"\x38" * count)])
            code = int(np.abs(2 * of_one * scales[1:] - spread).argmin()) + 1
            self._patch = [(0, bytes([code]) * count)]
        else:
            self._patch = self._scaled(1.0)
            self._patch = self._scaled(spread / self._measured(self._patch))

    def _scaled(self, step: float) -> list[tuple[int, bytes]]:
        scales = _scale_offsets(self.format)
        return [(at, np.float16(step * value).tobytes()) for at, value in scales.items()]

    def _measured(self, patch: list[tuple[int, bytes]]) -> float:
        """The spread of weights with these scales, measured on a sample."""
        return float(decode(self._patched(SAMPLE_BLOCKS, patch).reshape(-1), self.format.name).std())

    def _patched(self, blocks: int, patch: list[tuple[int, bytes]]) -> Bytes:
        size = self.format.block_bytes
        raw = np.frombuffer(self._random.bytes(blocks * size), np.uint8).reshape(blocks, size).copy()
        if self.format.name == "IQ1_M":
            self._scatter(raw[:, patch[0][0] :].view("<u2"), patch[0][1])
            return raw
        for offset, value in patch:
            raw[:, offset : offset + len(value)] = np.frombuffer(value, np.uint8)
        if _has_uneven_levels(self.format):
            last = patch[0][0] + 1
            raw[:, last] |= np.frombuffer(self._random.bytes(blocks), np.uint8) & 0x80
        return raw

    def _scatter(self, words: npt.NDArray[np.uint16], scale: bytes) -> None:
        """Write the scale, with a random sign, to the top nibbles of the words of IQ1_M's blocks."""
        signs = np.frombuffer(self._random.bytes(2 * len(words)), "<u2") & 0x8000
        bits = np.frombuffer(scale, "<u2") | signs
        words &= 0x0FFF
        words |= (bits[:, None] >> np.arange(0, 16, 4, dtype=np.uint16)) << np.uint16(12)

    def take(self, blocks: int) -> Bytes:
        """Return `blocks` blocks, (blocks, bytes of a block) uint8."""
        if self.format.name not in _FLOATS:
            return self._patched(blocks, self._patch)
        dtype, mask, fraction_bits, bias = _FLOATS[self.format.name]
        bits = np.frombuffer(self._random.bytes(blocks * self.format.block_bytes), dtype) & mask
        bits |= (self._exponent + bias) << fraction_bits
        return bits.astype(dtype, copy=False).view(np.uint8).reshape(blocks, -1)

    def stream(self, elements: int) -> Iterator[Bytes]:
        """Yield the blocks of `elements` weights, in pieces of some megabytes."""
        left = elements // self.format.block_elements
        max_blocks = max(1, PIECE_BYTES // self.format.block_bytes)
        while left:
            count = min(left, max_blocks)
            yield self.take(count)
            left -= count
