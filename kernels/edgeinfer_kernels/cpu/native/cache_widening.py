"""Pages of a cache in bytes back to float32, sixteen positions at a time."""

from edgeinfer_kernels.cpu.native.byte_lanes import load_signed_bytes, to_float
from edgeinfer_kernels.cpu.native.exports import inner
from edgeinfer_kernels.cpu.native.float_lanes import load_halves, multiply, splat_f32, store_floats
from edgeinfer_kernels.cpu.native.scalars import load_f32, load_i64, prefetch
from edgeinfer_kernels.cpu.structures import ATTENTION, CACHE_LINE, POSITIONS_A_TILE, SCALED

LANES = 16
PAGES_A_TILE = POSITIONS_A_TILE // LANES


@inner
def prefetch_page(at, nbytes):
    """Ask for the page that lies a tile behind the one of `nbytes` at `at`."""
    for line in range(PAGES_A_TILE * nbytes, (PAGES_A_TILE + 1) * nbytes, CACHE_LINE):
        prefetch(at + line)


@inner
def widen_keys(codes, scales, padded, target):
    """A page of keys in bytes to float32, in the same order."""
    for d in range(padded):
        scale = load_halves(scales + 2 * LANES * (d // SCALED))
        key = multiply(to_float(load_signed_bytes(codes + LANES * d)), scale)
        store_floats(target + 4 * LANES * d, key)


@inner
def widen_values(codes, scales, padded, target, spare):
    """A page of values in bytes to float32, in the same order; `spare`: 64 bytes."""
    for group in range((padded + SCALED - 1) // SCALED):
        store_floats(spare, load_halves(scales + 2 * LANES * group))
        for i in range(LANES):
            scale = splat_f32(load_f32(spare + 4 * i))
            for d in range(SCALED * group, min(padded, SCALED * (group + 1)), LANES):
                at = padded * i + d
                store_floats(target + 4 * at, multiply(to_float(load_signed_bytes(codes + at)), scale))


@inner
def widen_page(block, kv_head, page, padded, keys, values, spare):
    """Keys and values of a page of a cache in bytes to two places."""
    pages = load_i64(block + ATTENTION.context) // LANES
    place = kv_head * pages + page
    scale_bytes = 2 * LANES * ((padded + SCALED - 1) // SCALED)
    code_bytes = LANES * padded
    key_scales = load_i64(block + ATTENTION.key_scales) + scale_bytes * place
    value_scales = load_i64(block + ATTENTION.value_scales) + scale_bytes * place
    codes = load_i64(block + ATTENTION.key_cache) + code_bytes * place
    prefetch_page(codes, code_bytes)
    prefetch_page(key_scales, scale_bytes)
    widen_keys(codes, key_scales, padded, keys)
    codes = load_i64(block + ATTENTION.value_cache) + code_bytes * place
    prefetch_page(codes, code_bytes)
    prefetch_page(value_scales, scale_bytes)
    widen_values(codes, value_scales, padded, values, spare)
