"""Converts the bytes of a GGUF matrix to planes of words, with torch operations on the device of the
bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from edgeinfer_kernels.cuda.weights.plane_formats import BLOCK, Code, PlaneShapes, Scale
from edgeinfer_quant_formats import block_format
from edgeinfer_quant_formats.scale_fields import SCALE_FIELDS

_LOW = 0xFFFF


@dataclass(frozen=True)
class _Unpacked:
    """Some unpacked rows: codes (rows, blocks, 32) uint8, or words if they are stored unchanged.

    scales (rows, blocks) int32: 16 bits each, 32 for PAIR; supers (rows, super-blocks) int32.
    """

    codes: Tensor | None = None
    words: Tensor | None = None
    scales: Tensor | None = None
    supers: Tensor | None = None


def _halves(raw: Tensor) -> Tensor:
    """Pairs of bytes as unsigned 16-bit numbers, int32."""
    return raw.contiguous().view(torch.int16).to(torch.int32).squeeze(-1) & _LOW


def _words(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.int32)


def _nibbles(raw: Tensor) -> Tensor:
    """(…, 16) bytes to (…, 32): the low nibbles, then the high ones."""
    return torch.cat([raw & 15, raw >> 4], dim=-1)


def _fifth_bits(raw: Tensor) -> Tensor:
    """(…, 4) bytes, bit e of the word for element e, to (…, 32) of 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)
    bits = (raw[..., None] >> shifts) & 1
    return bits.flatten(-2) << 4


def _simple(raw: Tensor, *, minimum: bool, fifth: bool) -> _Unpacked:
    """Q4_0, Q4_1, Q5_0, Q5_1: half d, [half m], [uint32 of fifth bits], 16 bytes of nibbles."""
    head = 4 if minimum else 2
    scales = _words(raw[..., :4]).squeeze(-1) if minimum else _halves(raw[..., :2])
    codes = _nibbles(raw[..., -16:])
    if fifth:
        codes = codes | _fifth_bits(raw[..., head : head + 4])
    return _Unpacked(codes=codes, scales=scales)


def _q8_0(raw: Tensor) -> _Unpacked:
    return _Unpacked(codes=raw[..., 2:], scales=_halves(raw[..., :2]))


def _iq4_nl(raw: Tensor) -> _Unpacked:
    return _Unpacked(codes=_nibbles(raw[..., 2:]), scales=_halves(raw[..., :2]))


def _mxfp4(raw: Tensor) -> _Unpacked:
    """The scale 2^(e - 128) as bfloat16; below e = 2 it is subnormal."""
    e = raw[..., 0].to(torch.int32)
    subnormal = 0x20 << e.clamp(max=1)
    return _Unpacked(codes=_nibbles(raw[..., 1:]), scales=torch.where(e < 2, subnormal, (e - 1) << 7))


def _k_scales(raw: Tensor) -> Tensor:
    """Twelve bytes of a Q4_K or Q5_K block to (…, 8): 6-bit scale in the low byte, minimum in the next."""
    s = raw.to(torch.int32)
    low, middle, high = s[..., :4], s[..., 4:8], s[..., 8:]
    scale = torch.cat([low & 63, (high & 15) | ((low >> 6) << 4)], dim=-1)
    minimum = torch.cat([middle & 63, (high >> 4) | ((middle >> 6) << 4)], dim=-1)
    return scale | (minimum << 8)


def _pair_nibbles(raw: Tensor) -> Tensor:
    """(…, 128) bytes to (…, 8, 32): of each 32 bytes first the low nibbles, then the high ones."""
    groups = raw.unflatten(-1, (4, 32))
    return torch.stack([groups & 15, groups >> 4], dim=-2).flatten(-3, -2)


def _k_minimum(raw: Tensor, *, fifth: bool) -> _Unpacked:
    """Q4_K: half d, half dmin, 12 bytes of scales, 128 of nibbles; Q5_K has 32 of fifth bits between."""
    codes = _pair_nibbles(raw[..., -128:])
    if fifth:
        shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)[:, None]
        codes = codes | (((raw[..., None, 16:48] >> shifts) & 1) << 4)
    return _Unpacked(codes=codes, scales=_k_scales(raw[..., 4:16]), supers=_words(raw[..., :4]).squeeze(-1))


def _signed_pairs(scales: Tensor) -> Tensor:
    """(…, 16) int8 values in int32 to (…, 8): two of them in 16 bits."""
    pairs = scales.unflatten(-1, (8, 2)) & 255
    return pairs[..., 0] | (pairs[..., 1] << 8)


def _q6_k(raw: Tensor) -> _Unpacked:
    """128 bytes of low nibbles, 64 of upper two bits, 16 int8 scales, half d; each half holds 128 weights."""
    low = raw[..., :128].unflatten(-1, (2, 2, 32))
    high = raw[..., 128:192].unflatten(-1, (2, 1, 32))
    nibbles = torch.cat([low & 15, low >> 4], dim=-2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device)[:, None]
    codes = (nibbles | (((high >> shifts) & 3) << 4)).flatten(-3, -2)
    scales = raw[..., 192:208].contiguous().view(torch.int8).to(torch.int32)
    return _Unpacked(codes=codes, scales=_signed_pairs(scales), supers=_halves(raw[..., 208:]))


def _two_bits(raw: Tensor) -> Tensor:
    """(…, 64) bytes to (…, 8, 32): of each 32 bytes the lowest two bits, then the next two."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device)[:, None]
    return ((raw.unflatten(-1, (2, 1, 32)) >> shifts) & 3).flatten(-3, -2)


def _q3_k(raw: Tensor) -> _Unpacked:
    """32 bytes of third bits, 64 of two bits, 12 of 6-bit scales minus 32, half d."""
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)[:, None]
    third = (raw[..., None, :32] >> shifts) & 1
    codes = _two_bits(raw[..., 32:96]) | (third << 2)
    s = raw[..., 96:108].to(torch.int32)
    low, upper = s[..., :8], s[..., 8:]
    nibbles = torch.cat([low & 15, low >> 4], dim=-1)
    shifts = torch.arange(0, 8, 2, dtype=torch.int32, device=raw.device)[:, None]
    twos = ((upper[..., None, :] >> shifts) & 3).flatten(-2)
    return _Unpacked(
        codes=codes, scales=_signed_pairs((nibbles | (twos << 4)) - 32), supers=_halves(raw[..., 108:])
    )


def _q2_k(raw: Tensor) -> _Unpacked:
    """16 bytes of scale and minimum, 64 of two bits, half d, half dmin."""
    pairs = raw[..., :16].to(torch.int32).unflatten(-1, (8, 2))
    first, second = pairs[..., 0], pairs[..., 1]
    scales = (first & 15) | ((second & 15) << 4) | ((first >> 4) << 8) | ((second >> 4) << 12)
    return _Unpacked(
        codes=_two_bits(raw[..., 16:80]), scales=scales, supers=_words(raw[..., 80:]).squeeze(-1)
    )


def _iq4_xs(raw: Tensor) -> _Unpacked:
    """half d, uint16 of upper scale bits, 4 bytes of lower ones, 128 of nibbles; scales minus 32."""
    shifts = torch.arange(0, 16, 2, dtype=torch.int32, device=raw.device)
    upper = (_halves(raw[..., 2:4])[..., None] >> shifts) & 3
    low = raw[..., 4:8].to(torch.int32)
    lower = torch.stack([low & 15, low >> 4], dim=-1).flatten(-2)
    scale = ((lower | (upper << 4)) - 32)[..., None].expand(*lower.shape, 2).flatten(-2)
    codes = _nibbles(raw[..., 8:].unflatten(-1, (8, 16)))
    return _Unpacked(codes=codes, scales=_signed_pairs(scale), supers=_halves(raw[..., :2]))


def _floats(raw: Tensor) -> _Unpacked:
    return _Unpacked(words=_words(raw))


# Format -> (bytes of the file's block, weights per block, unpack function).
_UNPACKERS: dict[str, tuple[int, int, Callable[[Tensor], _Unpacked]]] = {
    "Q4_0": (18, 32, lambda raw: _simple(raw, minimum=False, fifth=False)),
    "Q4_1": (20, 32, lambda raw: _simple(raw, minimum=True, fifth=False)),
    "Q5_0": (22, 32, lambda raw: _simple(raw, minimum=False, fifth=True)),
    "Q5_1": (24, 32, lambda raw: _simple(raw, minimum=True, fifth=True)),
    "Q8_0": (34, 32, _q8_0),
    "Q2_K": (84, 256, _q2_k),
    "Q3_K": (110, 256, _q3_k),
    "Q4_K": (144, 256, lambda raw: _k_minimum(raw, fifth=False)),
    "Q5_K": (176, 256, lambda raw: _k_minimum(raw, fifth=True)),
    "Q6_K": (210, 256, _q6_k),
    "IQ4_NL": (18, 32, _iq4_nl),
    "IQ4_XS": (136, 256, _iq4_xs),
    "MXFP4": (17, 32, _mxfp4),
    "F16": (64, 32, _floats),
    "BF16": (64, 32, _floats),
    "F32": (128, 32, _floats),
}


def _code_words(codes: Tensor, code: Code) -> Tensor:
    """Codes (rows, blocks, 32) uint8 to words (rows, blocks, planes) int32."""
    if code == Code.BYTE:
        return _words(codes)
    if code == Code.CODEBOOK:
        halves = (codes[..., 0::2] | (codes[..., 1::2] << 4)).unflatten(-1, (2, 4, 2))
        return _words(halves.transpose(-3, -2).flatten(-3)).contiguous()
    low, high = codes[..., :16], codes[..., 16:]
    words = [_words((low & 15) | (high << 4))]
    if code != Code.NIBBLE:
        bits = 1 if code == Code.NIBBLE_1 else 2
        fields = ((codes >> 4) & (3 if bits == 2 else 1)).unflatten(-1, (2, 4, 4))
        shifts = torch.arange(0, 4 * bits, bits, dtype=torch.uint8, device=codes.device)[:, None]
        bytes_of_half = (fields << shifts).sum(dim=-2, dtype=torch.uint8)
        if bits == 1:
            words.append(_words(bytes_of_half[..., 0, :] | (bytes_of_half[..., 1, :] << 4)))
        else:
            words.append(_words(bytes_of_half.flatten(-2)))
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
    supers: Tensor

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.words, self.scales, self.supers

    def fill(self, first_row: int, raw: Tensor) -> None:
        """Pack the file's bytes of some rows, (rows, bytes of a row) uint8, to the even row `first_row`."""
        shapes, rows = self.shapes, len(raw)
        raw = torch.nn.functional.pad(raw, (0, 0, 0, rows % 2))
        block_bytes, _, unpack = _UNPACKERS[self.format]
        unpacked = unpack(raw.unflatten(-1, (-1, block_bytes)))
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
        if unpacked.supers is not None:
            supers = torch.nn.functional.pad(
                unpacked.supers, (0, shapes.blocks // 8 - unpacked.supers.shape[-1])
            )
            if shapes.tile.scale == Scale.SIGNED:
                self.supers[first_row // 2 : end // 2] = _row_pairs(supers)
            else:
                self.supers[first_row:end] = supers


def has_non_finite(raw: Tensor, format_name: str) -> Tensor:
    """Whether rows of the file, (rows, bytes of a row) uint8, have scales that are NaN or infinite: a bool
    tensor on the device.
    """
    field, form = SCALE_FIELDS[format_name], block_format(format_name)
    blocks = raw.unflatten(-1, (-1, form.block_bytes))
    numbers = blocks[..., field.offset : field.offset + field.unit * field.count].contiguous()
    bits = numbers.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[field.unit])
    return ((bits & field.exponent) == field.exponent).any()


def raw_row_bytes(format_name: str, columns: int) -> int:
    """Bytes of a row in the file."""
    block_bytes, weights, _ = _UNPACKERS[format_name]
    return columns // weights * block_bytes
