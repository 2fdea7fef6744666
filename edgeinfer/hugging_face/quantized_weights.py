"""Quantized weights of a folder in GGUF formats: FP8, GPTQ, AWQ and compressed-tensors.

Symmetric 4 bits with float16 scales are Q4_0 of the same codes, and 8 bits Q8_0: exact. Codes with zero
points are Q4_1, whose minimum -zero·scale is rounded to float16: at most 1/273 of a step. FP8 becomes F16.
Scales that float16 can't hold exactly are refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.hugging_face.stored import Bytes, Floats, Stored
from edgeinfer_quant_formats import block_format

Array = npt.NDArray[Any]
Reader = Callable[[str], Array]
BLOCK = 32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of a word in which AWQ stores each of eight columns."""
MIN_NORMAL = 2.0**-14
FORMATS = {(4, False): "Q4_0", (4, True): "Q4_1", (8, False): "Q8_0"}


class WeightsError(UnsupportedModelError):
    """Quantized weights that no GGUF format holds; the message says why."""


@dataclass(frozen=True)
class Scheme:
    """How matrices are quantized. `group`: columns that share a scale; 0: all of a row.

    `method`: gptq, awq, pack (compressed-tensors), fp8, or none. `stored_zeros_less_one`: GPTQ's first format
    stores zero points less 1.
    """

    method: str = "none"
    bits: int = 4
    group: int = 0
    has_zeros: bool = False
    stored_zeros_less_one: bool = True
    block: tuple[int, int] = (0, 0)
    """Rows and columns that share a scale of FP8; 0: all."""

    @property
    def marker(self) -> str:
        """The suffix of the tensor that a quantized matrix has."""
        return {"gptq": "qweight", "awq": "qweight", "pack": "weight_packed"}.get(self.method, "weight")

    @property
    def parts(self) -> tuple[str, ...]:
        """Suffixes of the tensors that belong to a quantized matrix."""
        parts = {
            "gptq": ("qweight", "qzeros", "scales", "g_idx"),
            "awq": ("qweight", "qzeros", "scales"),
            "pack": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
            "fp8": ("weight_scale", "weight_scale_inv", "input_scale"),
        }
        return parts.get(self.method, ())


def scheme_of(config: Mapping[str, Any]) -> Scheme:
    """The scheme of a folder's config. Raises `WeightsError`: one that isn't supported."""
    given = config.get("quantization_config")
    if not isinstance(given, Mapping):
        return Scheme()
    method = str(given.get("quant_method", ""))
    if method == "compressed-tensors":
        return _compressed_tensors(given)
    if method == "fp8":
        block = given.get("weight_block_size") or (0, 0)
        return Scheme("fp8", 8, block=(int(block[0]), int(block[1])))
    if method not in ("gptq", "awq"):
        raise WeightsError(f"quant_method {method!r}, wanted gptq, awq, fp8 or compressed-tensors")
    bits, group = int(given.get("bits", 4)), max(0, int(given.get("group_size", 128)))
    if method == "awq":
        if str(given.get("version", "gemm")).lower() != "gemm":
            raise WeightsError(f"AWQ of version {given.get('version')!r}, wanted gemm")
        return _checked(Scheme("awq", bits, group, has_zeros=bool(given.get("zero_point", True))))
    less_one = given.get("checkpoint_format", "gptq") != "gptq_v2"
    zeros = not given.get("sym", True)
    return _checked(Scheme("gptq", bits, group, zeros, less_one))


def _compressed_tensors(given: Mapping[str, Any]) -> Scheme:
    groups = given.get("config_groups") or {}
    if len(groups) != 1:
        raise WeightsError(f"{len(groups)} config_groups, wanted one for all matrices")
    weights: Mapping[str, Any] = next(iter(groups.values())).get("weights") or {}
    form = str(given.get("format", ""))
    if form in ("float-quantized", "naive-quantized") and weights.get("type") == "float":
        block = weights.get("block_structure") or (0, 0)
        return Scheme("fp8", 8, block=(int(block[0]), int(block[1])))
    if form != "pack-quantized" or weights.get("type", "int") != "int":
        raise WeightsError(f"compressed-tensors of format {form!r}, wanted pack-quantized or float-quantized")
    group = int(weights.get("group_size") or 0)
    return _checked(
        Scheme("pack", int(weights.get("num_bits", 4)), max(0, group), not weights.get("symmetric", True))
    )


def _checked(scheme: Scheme) -> Scheme:
    if (scheme.bits, scheme.has_zeros) not in FORMATS:
        zeros = " with zero points" if scheme.has_zeros else ""
        raise WeightsError(f"{scheme.bits} bits{zeros}, wanted 4 bits, or 8 without zero points")
    if scheme.group % BLOCK:
        raise WeightsError(f"groups of {scheme.group} columns, wanted a multiple of {BLOCK}")
    return scheme


def quantized(name: str, read: Reader, names: Mapping[str, Any], scheme: Scheme) -> Stored:
    """The matrix `name`, without suffix, from its parts. Raises `WeightsError`."""
    if scheme.method == "fp8":
        return _fp8(name, read, names, scheme)
    if scheme.method == "pack":
        shape = tuple(int(size) for size in read(f"{name}.weight_shape"))
    else:
        packed = read(f"{name}.qweight").shape
        per_word = 32 // scheme.bits
        gptq = scheme.method == "gptq"
        shape = (packed[1], packed[0] * per_word) if gptq else (packed[1] * per_word, packed[0])
    if len(shape) != 2 or shape[1] % BLOCK:
        raise WeightsError(f"{name}: shape {shape}, wanted rows of a multiple of {BLOCK} columns")
    kind = block_format(FORMATS[scheme.bits, scheme.has_zeros])
    return Stored(shape, kind, lambda: _blocks(name, read, names, scheme, shape))


def _blocks(
    name: str, read: Reader, names: Mapping[str, Any], scheme: Scheme, shape: tuple[int, ...]
) -> Bytes:
    codes, scales, zeros = _PARTS[scheme.method](name, read, names, scheme)
    rows, columns = shape
    group = scheme.group or columns
    if codes.shape != (rows, columns) or scales.shape != (rows, columns // group):
        raise WeightsError(f"{name}: codes {codes.shape} and scales {scales.shape} don't fit {shape}")
    repeats = group // BLOCK
    if not scheme.has_zeros and zeros is not None and (zeros != 1 << (scheme.bits - 1)).any():
        raise WeightsError(f"{name}: a zero point of symmetric weights isn't {1 << (scheme.bits - 1)}")
    d = np.repeat(_exact_f16(name, scales), repeats, axis=1).reshape(-1, 1)
    blocks = codes.reshape(-1, BLOCK)
    if scheme.bits == 8:
        signed = (blocks.astype(np.int16) - 128).astype(np.int8)
        return np.concatenate([d.view(np.uint8), signed.view(np.uint8)], axis=1).reshape(rows, -1)
    nibbles = blocks[:, : BLOCK // 2] | (blocks[:, BLOCK // 2 :] << np.uint8(4))
    fields = [d.view(np.uint8)]
    if scheme.has_zeros:
        assert zeros is not None
        minima = (-zeros.astype(np.float32) * scales.astype(np.float32)).astype(np.float16)
        fields.append(np.repeat(minima, repeats, axis=1).reshape(-1, 1).view(np.uint8))
    return np.concatenate([*fields, nibbles], axis=1).reshape(rows, -1)


def _exact_f16(name: str, scales: Floats) -> npt.NDArray[np.float16]:
    """The scales in float16: exact, but those below 2^-14 are rounded to a multiple of 2^-24."""
    with np.errstate(over="ignore"):
        rounded = scales.astype(np.float16)
    if ((rounded.astype(np.float32) != scales) & ~(np.abs(scales) < MIN_NORMAL)).any():
        raise WeightsError(f"{name}: float16 doesn't hold a scale exactly, which Q4_0, Q4_1 and Q8_0 need")
    return np.ascontiguousarray(rounded)


Parts = tuple[npt.NDArray[np.uint8], Floats, npt.NDArray[np.uint8] | None]


def _gptq(name: str, read: Reader, names: Mapping[str, Any], scheme: Scheme) -> Parts:
    """(rows, columns) codes, (rows, groups) scales and zero points."""
    bits = scheme.bits
    codes = unpacked(read(f"{name}.qweight").T, bits)
    scales = floats_of(read, names, f"{name}.scales").T
    if f"{name}.g_idx" in names:
        group = scheme.group or codes.shape[1]
        if (read(f"{name}.g_idx") != np.arange(codes.shape[1]) // group).any():
            raise WeightsError(f"{name}: its columns are in activation order (desc_act), wanted file order")
    zeros = unpacked(read(f"{name}.qzeros"), bits).T
    return codes, np.ascontiguousarray(scales), zeros + np.uint8(scheme.stored_zeros_less_one)


def _awq(name: str, read: Reader, names: Mapping[str, Any], scheme: Scheme) -> Parts:
    def columns(words: Array) -> npt.NDArray[np.uint8]:
        nibbles = unpacked(words, scheme.bits).reshape(len(words), -1, len(AWQ_ORDER))
        return nibbles[:, :, list(AWQ_ORDER)].reshape(len(words), -1)

    codes = columns(read(f"{name}.qweight")).T
    zeros = columns(read(f"{name}.qzeros")).T if f"{name}.qzeros" in names else None
    return (
        np.ascontiguousarray(codes),
        np.ascontiguousarray(floats_of(read, names, f"{name}.scales").T),
        zeros,
    )


def _pack(name: str, read: Reader, names: Mapping[str, Any], scheme: Scheme) -> Parts:
    if f"{name}.weight_g_idx" in names:
        raise WeightsError(f"{name}: its columns are in activation order (actorder), wanted file order")
    rows, columns = (int(size) for size in read(f"{name}.weight_shape"))
    codes = unpacked(read(f"{name}.weight_packed"), scheme.bits)[:, :columns]
    scales = floats_of(read, names, f"{name}.weight_scale").reshape(rows, -1)
    zeros = None
    if f"{name}.weight_zero_point" in names:
        zeros = unpacked(read(f"{name}.weight_zero_point").T, scheme.bits).T[:rows]
    return codes, scales, zeros


_PARTS: dict[str, Callable[[str, Reader, Mapping[str, Any], Scheme], Parts]] = {
    "gptq": _gptq,
    "awq": _awq,
    "pack": _pack,
}


def unpacked(words: Array, bits: int) -> npt.NDArray[np.uint8]:
    """The codes of rows of 32-bit words, the lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    codes = (unsigned[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return codes.reshape(*words.shape[:-1], -1).astype(np.uint8)


def floats_of(read: Reader, names: Mapping[str, Any], name: str) -> Floats:
    """A tensor of floats in float32. Raises `WeightsError`: it has another type."""
    array, dtype = read(name), names[name][1].dtype
    if dtype == "BF16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype not in ("F32", "F16", "F64"):
        raise WeightsError(f"{name}: type {dtype}, wanted floats")
    return array.astype(np.float32)


def e4m3_table() -> Floats:
    """The values of the 256 codes of FP8 E4M3."""
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent > 0, (1 + fraction / 8) * 2.0 ** (exponent - 7), fraction / 8 * 2.0**-6)
    magnitude = np.where(codes & 127 == 127, np.nan, magnitude)
    return (np.where(codes & 128, -1, 1) * magnitude).astype(np.float32)


def _fp8(name: str, read: Reader, names: Mapping[str, Any], scheme: Scheme) -> Stored:
    info = names[f"{name}.weight"][1]
    if info.dtype != "F8_E4M3":
        raise WeightsError(f"{name}.weight: type {info.dtype}, wanted F8_E4M3")
    found = [s for s in ("weight_scale_inv", "weight_scale") if f"{name}.{s}" in names]
    if not found:
        raise WeightsError(f"{name}.weight: no weight_scale or weight_scale_inv, wanted one")
    rows, columns = info.shape

    def load() -> Bytes:
        values = e4m3_table()[read(f"{name}.weight")]
        scales = floats_of(read, names, f"{name}.{found[0]}")
        scales = scales.reshape(scales.shape if scales.ndim == 2 else (-1, 1))
        high, wide = (scheme.block[0] or -(-rows // len(scales))), (scheme.block[1] or columns)
        whole = np.repeat(np.repeat(scales, high, axis=0), wide, axis=1)[:rows, :columns]
        if whole.shape != values.shape:
            raise WeightsError(f"{name}: scales of shape {scales.shape} don't fit {info.shape}")
        with np.errstate(over="ignore"):
            rounded = (values * whole).astype(np.float16)
        if not np.isfinite(rounded).all():
            raise WeightsError(f"{name}: a weight is NaN or beyond float16, wanted weights up to 65504")
        return rounded.view(np.uint8)

    return Stored(info.shape, block_format("F16"), load)
