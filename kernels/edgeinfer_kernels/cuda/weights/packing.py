"""Converts the bytes of a GGUF matrix to planes of words, with torch operations on the device of the
bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from edgeinfer_kernels.cuda.weights.grid_packing import unpack_grid_blocks
from edgeinfer_kernels.cuda.weights.plane_formats import BLOCK, Code, PlaneShapes, Scale
from edgeinfer_quant_formats.formats import FORMATS, CodeBits, FormatSpec, SubScales

_LOW = 0xFFFF
MAX_WEIGHTS, MAX_GRID_WEIGHTS = 16 << 20, 1 << 20
"""Weights that are unpacked at once: temporary tensors take up to 6 bytes for each, with a grid 70."""


@dataclass(frozen=True)
class _Unpacked:
    """Some unpacked rows: codes (rows, blocks, 32) uint8, or words if they are stored unchanged.

    scales (rows, blocks) int32: 16 bits each, 32 for PAIR; super_scales (rows, super-blocks) int32.
    """

    codes: Tensor | None = None
    words: Tensor | None = None
    scales: Tensor | None = None
    super_scales: Tensor | None = None


def _rows_at_once(spec: FormatSpec, columns: int) -> int:
    """An even number of rows with at most MAX_WEIGHTS, with a grid MAX_GRID_WEIGHTS; at least two."""
    return max((MAX_GRID_WEIGHTS if spec.grid else MAX_WEIGHTS) // columns // 2, 1) * 2


def _f16_bits(raw: Tensor) -> Tensor:
    """A pair of bytes as an unsigned 16-bit number, int32."""
    return raw.contiguous().view(torch.int16).to(torch.int32).squeeze(-1) & _LOW


def _words(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.int32)


def _field(spec: FormatSpec, raw: Tensor, name: str) -> Tensor:
    """The bytes of a field in blocks (rows, blocks, bytes of a block)."""
    field = spec.field(name)
    return raw[..., field.offset : field.end]


def _fields_of_bytes(raw: Tensor, part: CodeBits) -> Tensor:
    """(…, bytes) to (…, codes): `part.bits` of each code, as `codecs.bit_fields.unpack_fields`."""
    if part.bits == 8:
        return raw
    shifts = torch.arange(0, 8, part.bits, dtype=torch.uint8, device=raw.device)[:, None]
    groups = raw.unflatten(-1, (-1, 1, part.group))
    return ((groups >> shifts) & ((1 << part.bits) - 1)).flatten(-3)


def _codes(spec: FormatSpec, raw: Tensor) -> Tensor:
    """The codes of blocks, times the step of the format: (rows, blocks, weights of a block) uint8."""
    if not spec.codes:
        return _base_three(spec, raw)
    lowest, *upper = spec.codes
    codes = _fields_of_bytes(_field(spec, raw, lowest.field), lowest)
    for part in upper:
        codes = codes | (_fields_of_bytes(_field(spec, raw, part.field), part) << part.shift)
    return codes * spec.step if spec.step > 1 else codes


def _base_three(spec: FormatSpec, raw: Tensor) -> Tensor:
    """The ternary digits of TQ1_0, as `codecs.ternary.unpack_base_three`: (rows, blocks, 256) uint8."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=raw.device)[:, None]
    qs, qh = _field(spec, raw, "qs"), _field(spec, raw, "qh")
    parts = ((qs[..., :32], 5), (qs[..., 32:], 5), (qh, 4))
    remainders = [(part[..., None, :] * powers[:count]).flatten(-2) for part, count in parts]
    return ((torch.cat(remainders, dim=-1).to(torch.int16) * 3) >> 8).to(torch.uint8)


def _e4m3_pairs(raw: Tensor) -> Tensor:
    """(…, blocks, 2n) E4M3 numbers, of which 127 is 0, to (…, blocks · n): two of them in 16 bits."""
    numbers = torch.where(raw == 127, 0, raw & 127).to(torch.int32).unflatten(-1, (-1, 2))
    return (numbers[..., 0] | (numbers[..., 1] << 8)).flatten(-2)


def _scales(spec: FormatSpec, raw: Tensor) -> Tensor:
    """The scales of blocks of 32 weights for formats without sub-block scales, (rows, blocks of 32) int32."""
    first = spec.fields[0]
    if first.dtype == "e4m3":
        return _e4m3_pairs(_field(spec, raw, "d"))
    if first.dtype == "e8m0":
        # 2^(e - 128) as bfloat16; below e = 2 it is subnormal.
        e = raw[..., first.offset].to(torch.int32)
        scales = torch.where(e < 2, 0x20 << e.clamp(max=1), (e - 1) << 7)
    elif spec.has_minimum:
        scales = _words(raw[..., first.offset : first.offset + 4]).squeeze(-1)
    else:
        scales = _f16_bits(_field(spec, raw, "d"))
    return scales.repeat_interleave(spec.block_elements // BLOCK, dim=-1)


def _six_bits_and_minima(spec: FormatSpec, raw: Tensor) -> Tensor:
    """(…, 8): 6-bit scale in the low byte, minimum in the next."""
    s = _field(spec, raw, "scales").to(torch.int32)
    low, middle, high = s[..., :4], s[..., 4:8], s[..., 8:]
    scale = torch.cat([low & 63, (high & 15) | ((low >> 6) << 4)], dim=-1)
    minimum = torch.cat([middle & 63, (high >> 4) | ((middle >> 6) << 4)], dim=-1)
    return scale | (minimum << 8)


def _nibbles_and_minima(spec: FormatSpec, raw: Tensor) -> Tensor:
    """(…, 8): two scales of 4 bits, then two minima of 4 bits."""
    pairs = _field(spec, raw, "scales").to(torch.int32).unflatten(-1, (8, 2))
    first, second = pairs[..., 0], pairs[..., 1]
    return (first & 15) | ((second & 15) << 4) | ((first >> 4) << 8) | ((second >> 4) << 12)


def _signed_pairs(scales: Tensor) -> Tensor:
    """(…, 16) int8 values in int32 to (…, 8): two of them in 16 bits."""
    pairs = scales.unflatten(-1, (8, 2)) & 255
    return pairs[..., 0] | (pairs[..., 1] << 8)


def _bytes(spec: FormatSpec, raw: Tensor) -> Tensor:
    return _signed_pairs(_field(spec, raw, "scales").contiguous().view(torch.int8).to(torch.int32))


def _six_bits(spec: FormatSpec, raw: Tensor) -> Tensor:
    """The four low bits of sixteen scales in 8 bytes, the two high bits in 4."""
    s = _field(spec, raw, "scales").to(torch.int32)
    low, upper = s[..., :8], s[..., 8:]
    nibbles = torch.cat([low & 15, low >> 4], dim=-1)
    shifts = torch.arange(0, 8, 2, dtype=torch.int32, device=raw.device)[:, None]
    twos = ((upper[..., None, :] >> shifts) & 3).flatten(-2)
    return _signed_pairs((nibbles | (twos << 4)) - 32)


def _split_six_bits(spec: FormatSpec, raw: Tensor) -> Tensor:
    """The upper two bits of eight scales in 16 bits, the lower four in 4 bytes."""
    shifts = torch.arange(0, 16, 2, dtype=torch.int32, device=raw.device)
    upper = (_f16_bits(_field(spec, raw, "scales_h"))[..., None] >> shifts) & 3
    low = _field(spec, raw, "scales_l").to(torch.int32)
    lower = torch.stack([low & 15, low >> 4], dim=-1).flatten(-2)
    return _signed_pairs(((lower | (upper << 4)) - 32).repeat_interleave(2, dim=-1))


_SUB_SCALES: dict[SubScales, Callable[[FormatSpec, Tensor], Tensor]] = {
    SubScales.SIX_BITS_AND_MINIMA: _six_bits_and_minima,
    SubScales.NIBBLES_AND_MINIMA: _nibbles_and_minima,
    SubScales.SIX_BITS: _six_bits,
    SubScales.BYTES: _bytes,
    SubScales.SPLIT_SIX_BITS: _split_six_bits,
}


def _unpack(spec: FormatSpec, raw: Tensor) -> _Unpacked:
    """Rows of the file, (rows, bytes of a row) uint8."""
    if not spec.is_quantized:
        return _Unpacked(words=_words(raw.unflatten(-1, (-1, BLOCK * spec.block_bytes))))
    raw = raw.unflatten(-1, (-1, spec.block_bytes))
    if spec.grid:
        levels, factors, scale = unpack_grid_blocks(spec, raw)
        return _Unpacked(codes=levels, scales=_signed_pairs(factors), super_scales=scale)
    codes = _codes(spec, raw)
    if spec.sub_scales is None:
        return _Unpacked(codes=codes, scales=_scales(spec, raw))
    d = spec.field("d")
    # d and dmin, which are adjacent, as one word.
    factors = _words(raw[..., d.offset : d.offset + 4]).squeeze(-1) if spec.has_minimum else None
    super_scales = _f16_bits(_field(spec, raw, "d")) if factors is None else factors
    return _Unpacked(codes=codes, scales=_SUB_SCALES[spec.sub_scales](spec, raw), super_scales=super_scales)


def _code_words(codes: Tensor, code: Code) -> Tensor:
    """Codes (rows, blocks, 32) uint8 to words (rows, blocks, planes) int32."""
    if code == Code.BYTE:
        return _words(codes)
    if code == Code.CODEBOOK:
        nibbles = (codes[..., 0::2] | (codes[..., 1::2] << 4)).unflatten(-1, (2, 4, 2))
        return _words(nibbles.transpose(-3, -2).flatten(-3)).contiguous()
    low, high = codes[..., :16], codes[..., 16:]
    words = [_words((low & 15) | (high << 4))]
    if code != Code.NIBBLE:
        bits = 1 if code == Code.NIBBLE_1 else 2
        fields = ((codes >> 4) & (3 if bits == 2 else 1)).unflatten(-1, (2, 4, 4))
        shifts = torch.arange(0, 4 * bits, bits, dtype=torch.uint8, device=codes.device)[:, None]
        packed_fields = (fields << shifts).sum(dim=-2, dtype=torch.uint8)
        if bits == 1:
            words.append(_words(packed_fields[..., 0, :] | (packed_fields[..., 1, :] << 4)))
        else:
            words.append(_words(packed_fields.flatten(-2)))
    return torch.cat(words, dim=-1)


def _permuted(values: Tensor, blocks: int) -> Tensor:
    """The last axis, blocks of a row, padded to `blocks` and in the device's order."""
    padded = torch.nn.functional.pad(values, (0, blocks - values.shape[-1]))
    return padded.unflatten(-1, (blocks // 8, 8)).transpose(-1, -2).flatten(-2)


def _row_pairs(values: Tensor) -> Tensor:
    """(rows, n) of 16 bits to (rows/2, n): the even rows in the low 16 bits."""
    return (values[0::2] & _LOW) | (values[1::2] << 16)


@dataclass(frozen=True)
class DeviceMatrix:
    """A matrix in planes; `parts` are its words, scales and super-block scales, as kernels take them."""

    shapes: PlaneShapes
    format: str
    words: Tensor
    scales: Tensor
    super_scales: Tensor

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.words, self.scales, self.super_scales

    def fill(self, first_row: int, raw: Tensor, factors: Tensor | None = None) -> None:
        """Pack the file's bytes of some rows, (rows, bytes of a row) uint8, to the even row `first_row`.

        `factors`: of the weights of each row, float32; only for formats of `Scale.E4M3`. None: all are 1.
        """
        shapes, rows = self.shapes, len(raw)
        if shapes.tile.scale == Scale.E4M3:
            self.set_factors(first_row, rows, 1.0 if factors is None else factors)
        raw = torch.nn.functional.pad(raw, (0, 0, 0, rows % 2))
        at_once = _rows_at_once(FORMATS[self.format], shapes.columns)
        for start in range(0, len(raw), at_once):
            self._fill_piece(first_row + start, raw[start : start + at_once])

    def _fill_piece(self, first_row: int, raw: Tensor) -> None:
        """As `fill`, of an even number of rows that are unpacked at once."""
        shapes = self.shapes
        unpacked = _unpack(FORMATS[self.format], raw)
        end, code = first_row + len(raw), Code(shapes.tile.code)
        words = unpacked.words
        if unpacked.codes is not None:
            codes = unpacked.codes.reshape(len(raw), -1, BLOCK)
            words = _code_words(codes, code)
        assert words is not None
        self.words[first_row:end] = _permuted(words.transpose(1, 2), shapes.blocks)
        if unpacked.scales is not None:
            scales = _permuted(unpacked.scales.flatten(1), shapes.blocks)
            if shapes.tile.scale == Scale.PAIR:
                self.scales[first_row:end] = scales
            else:
                self.scales[first_row // 2 : end // 2] = _row_pairs(scales)
        if unpacked.super_scales is not None:
            super_scales = torch.nn.functional.pad(
                unpacked.super_scales, (0, shapes.blocks // 8 - unpacked.super_scales.shape[-1])
            )
            if shapes.tile.scale == Scale.SIGNED:
                self.super_scales[first_row // 2 : end // 2] = _row_pairs(super_scales)
            else:
                self.super_scales[first_row:end] = super_scales

    def set_factors(self, first_row: int, rows: int, factors: Tensor | float) -> None:
        """Set the factors of some rows in a format of `Scale.E4M3`: one for all, or one for each."""
        own = self.super_scales.view(torch.float32)[first_row : first_row + rows, 0]
        if isinstance(factors, float):
            own.fill_(factors)
        else:
            own.copy_(factors)


def has_non_finite(raw: Tensor, format_name: str) -> Tensor:
    """Whether rows of the file, (rows, bytes of a row) uint8, have scales that are NaN or infinite: a bool
    tensor on the device.
    """
    spec = FORMATS[format_name]
    field = spec.scales
    if field is None:
        return torch.zeros((), dtype=torch.bool, device=raw.device)
    blocks = raw.unflatten(-1, (-1, spec.block_bytes))
    numbers = blocks[..., field.offset : field.offset + field.unit * field.count].contiguous()
    bits = numbers.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[field.unit])
    return ((bits & field.exponent) == field.exponent).any()
