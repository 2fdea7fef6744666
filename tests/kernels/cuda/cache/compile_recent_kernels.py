"""Compiles the kernels of caches with recent positions in f16 for a GPU that needn't be there, and prints
their resources: of texts with a window, and of sequences in pages.
"""

import sys

from edgeinfer_kernels.caches.cache_types import CacheType
from tests.kernels.cuda.cache.compile_ring_kernels import compile_cases
from tests.kernels.cuda.decode.compile_batch_kernels import compile_kinds

CASES: tuple[tuple[int, CacheType], ...] = ((64, "q4_0+f16"), (128, "q8_0/q4_0+f16"))
"""Elements of a head, and the type of the cache."""
KINDS: tuple[CacheType, ...] = ("q4_0+f16", "fp8+f16")


def main() -> None:
    capability = int(sys.argv[1])
    compile_cases(CASES, capability)
    compile_kinds(KINDS, capability)


if __name__ == "__main__":
    main()
