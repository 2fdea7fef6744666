"""Registers, spills and shared memory of the kernels of prompts and sampling, per target; no GPU needed.

python benchmarks/cuda_kernels.py --targets 75,90 --head-dims 64,128
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

from edgeinfer.benchmarking import suites
from edgeinfer.benchmarking.tables import markdown
from edgeinfer_kernels.cuda.flash_attention import attention_tile, flash_attention
from edgeinfer_kernels.cuda.prefill_rope import rope_append
from edgeinfer_kernels.cuda.prefill_rows import activation_rows, join_rows, norm_rows
from edgeinfer_kernels.cuda.sampling import KEPT, REQUEST_SIZE, SLICE, SamplingBuffers, argmax, sample
from edgeinfer_kernels.cuda.targets import TARGETS, Launch, compile_launch, recorded_launches
from edgeinfer_kernels.specification import AttentionSpecification, NormSpecification

NORM = NormSpecification("rms", 1e-5)
TOKENS, POSITIONS, KV_HEADS, GROUP = 5, 4096, 8, 4
HALF, SINGLE, DOUBLE, BYTE, WHOLE = torch.float16, torch.float32, torch.float64, torch.int8, torch.int32


def empty(*shape: int, dtype: torch.dtype = SINGLE) -> torch.Tensor:
    """A tensor without memory: a launch that is only recorded looks at its type and shape."""
    return torch.empty(shape, dtype=dtype, device="meta")


def prompt_rows(width: int, hidden: int) -> None:
    """The kernels between the matrix products."""
    x, half, scales = empty(TOKENS, width), empty(TOKENS, width, dtype=HALF), empty(TOKENS)
    norm_rows(x, NORM, empty(width), None, half, scales)
    join_rows(x, x, scales, None, NORM, None, 1.0, NORM, empty(width), None, half, scales)
    both = empty(TOKENS, 2 * hidden)
    out = empty(TOKENS, hidden, dtype=HALF)
    activation_rows(both[:, :hidden], both[:, hidden:], None, None, scales, "silu", out, scales)


def attention(head_dim: int, quantised: bool, capability: int) -> None:
    """RoPE and attention of a prompt, on a float16 or a q8_0 cache."""
    heads = KV_HEADS * GROUP
    facts = AttentionSpecification(heads, KV_HEADS, head_dim, head_dim**-0.5, NORM, None)
    cache = empty(KV_HEADS, POSITIONS, head_dim, dtype=BYTE if quantised else HALF)
    cache_scales = empty(KV_HEADS, POSITIONS, -(-head_dim // 32), dtype=HALF) if quantised else None
    queries = empty(TOKENS, heads, head_dim, dtype=HALF)
    qkv = empty(TOKENS, (heads + 2 * KV_HEADS) * head_dim)
    table, scales = empty(POSITIONS, head_dim), empty(TOKENS)
    rope_append(
        qkv, scales, None, None, None, table, facts, 7, queries, cache, cache, cache_scales, cache_scales
    )
    out = empty(TOKENS, heads * head_dim, dtype=HALF)
    tile = attention_tile(head_dim, GROUP, capability, quantised)
    flash_attention(queries, cache, cache, 7, facts, out, tile, cache_scales, cache_scales)


def choosing(vocabulary: int, kept: int, piece: int) -> None:
    """Sampling and argmax."""
    buffers = SamplingBuffers.allocate(1, vocabulary, "meta", kept, piece)
    logits, chosen, results = empty(1, vocabulary), empty(1, dtype=WHOLE), empty(1, 2, dtype=WHOLE)
    requests, recent = empty(1, REQUEST_SIZE, dtype=DOUBLE), empty(1, 64, dtype=WHOLE)
    sample(logits, requests, recent, buffers, chosen, results)
    argmax(logits, buffers, chosen, results)


def launches(capability: int, head_dims: tuple[int, ...], smoke: bool) -> Iterator[tuple[str, Launch]]:
    """Every kernel with what it is compiled for."""
    width, hidden = (512, 1024) if smoke else (4096, 14336)
    vocabulary, kept, piece = (1000, 16, 128) if smoke else (128256, KEPT, SLICE)
    groups: list[tuple[str, Callable[[], None]]] = [(f"width {width}", partial(prompt_rows, width, hidden))]
    for head_dim, quantised in product(head_dims, (False, True)):
        label = f"head of {head_dim}, {'q8_0' if quantised else 'f16'}"
        groups.append((label, partial(attention, head_dim, quantised, capability)))
    groups.append((f"vocabulary of {vocabulary}", partial(choosing, vocabulary, kept, piece)))
    for label, launch_all in groups:
        with recorded_launches() as found:
            launch_all()
        yield from ((label, launch) for launch in found)


def main() -> None:
    """Compile all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", default=",".join(map(str, TARGETS)), help="(%(default)s)")
    parser.add_argument("--head-dims", default="64,128", help="with commas (%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="small sizes, which compile in seconds")
    options = parser.parse_args()
    head_dims = (32,) if options.smoke else suites.whole_numbers("--head-dims", options.head_dims, 16)
    rows = []
    for capability in suites.whole_numbers("--targets", options.targets, 75):
        for label, launch in launches(capability, head_dims, options.smoke):
            taken = compile_launch(launch, capability)
            numbers = (taken.warps, taken.registers, taken.spilled_bytes, taken.shared_bytes)
            rows.append([f"sm_{capability}", launch.name, label, *map(str, numbers)])
    head = ["target", "kernel", "for", "warps", "registers", "spilled bytes", "shared bytes"]
    print(markdown(head, rows, left=(0, 1, 2)))


if __name__ == "__main__":
    suites.main(main)
