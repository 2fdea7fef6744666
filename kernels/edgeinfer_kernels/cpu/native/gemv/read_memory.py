"""The kernel of `bandwidth.py`."""

from numba import types

from edgeinfer_kernels.cpu.native.simd.byte_lanes import add_i32, lanes_sum_i32, load_ints, splat_i32
from edgeinfer_kernels.cpu.native.simd.exports import Exports
from edgeinfer_kernels.cpu.native.simd.scalars import store_i64
from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE
from edgeinfer_kernels.cpu.runtime.kernel_args import ReadMemoryArgs, ThreadPoolArgs

exports = Exports()


@exports.add("read_memory", int, ReadMemoryArgs, ThreadPoolArgs, int)
def read_memory(memory, args, pool, thread):
    """Each thread reads a part of the bytes at `memory`; the sums prevent that reads are optimized away."""
    threads = pool.threads
    share = args.nbytes // threads // 256 * 256
    a = splat_i32(types.int32(0))
    b = splat_i32(types.int32(0))
    c = splat_i32(types.int32(0))
    d = splat_i32(types.int32(0))
    for at in range(memory + thread * share, memory + (thread + 1) * share, 256):
        a = add_i32(a, load_ints(at))
        b = add_i32(b, load_ints(at + 64))
        c = add_i32(c, load_ints(at + 128))
        d = add_i32(d, load_ints(at + 192))
    total = lanes_sum_i32(add_i32(add_i32(a, b), add_i32(c, d)))
    store_i64(args.sums + CACHE_LINE * thread, types.int64(total))
