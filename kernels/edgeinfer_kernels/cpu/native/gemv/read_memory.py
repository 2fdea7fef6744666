"""The kernel of `bandwidth.py`."""

from numba import types

from edgeinfer_kernels.cpu.native.simd.byte_lanes import add_i32, lanes_sum_i32, load_ints, splat_i32
from edgeinfer_kernels.cpu.native.simd.exports import Exports
from edgeinfer_kernels.cpu.native.simd.scalars import load_i64, store_i64
from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE, TEAM

exports = Exports()


@exports.add("read_memory", 4)
def read_memory(block, call, team, thread):
    """Each thread reads its share of `call[0]` bytes at `block`; the sums are written to `call[1]`, so that
    no read is optimized away.
    """
    threads = load_i64(team + TEAM.threads)
    share = load_i64(call) // threads // 256 * 256
    a = splat_i32(types.int32(0))
    b = splat_i32(types.int32(0))
    c = splat_i32(types.int32(0))
    d = splat_i32(types.int32(0))
    for at in range(block + thread * share, block + (thread + 1) * share, 256):
        a = add_i32(a, load_ints(at))
        b = add_i32(b, load_ints(at + 64))
        c = add_i32(c, load_ints(at + 128))
        d = add_i32(d, load_ints(at + 192))
    total = lanes_sum_i32(add_i32(add_i32(a, b), add_i32(c, d)))
    store_i64(load_i64(call + 8) + CACHE_LINE * thread, types.int64(total))
