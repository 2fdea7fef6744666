"""Registers, spills and shared memory of every kernel, per target; no GPU needed.

python benchmarks/gpu/kernels.py --targets 75,90 --head-dims 64,128 --shapes llama-3-8b --types Q4_0,Q4_K_M
"""

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from edgeinfer.benchmarking.tables import markdown
from edgeinfer.shapes.known_shapes import find_shape
from edgeinfer.shapes.shape import Shape
from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.common.rope import RopeSpec
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.backend import DEPENDENT_LAUNCH_FROM
from edgeinfer_kernels.cuda.cache.shift_kernels import ShiftedHeads, shift_context
from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
from edgeinfer_kernels.cuda.decode.sampling import SamplingBuffers, argmax, sample, sample_best_kernel
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.decode.step_norms import NextNorm
from edgeinfer_kernels.cuda.decode.workspace import Workspace
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.offload.cpu_stages import DecodeExchange
from edgeinfer_kernels.cuda.offload.exchange_buffer import ExchangeBuffer, max_experts_per_token
from edgeinfer_kernels.cuda.prefill.expert_matmul import (
    ExpertRows,
    add_experts,
    expert_product,
    expert_tile,
    grouped_product,
    grouped_tile,
)
from edgeinfer_kernels.cuda.prefill.flash_attention import attention_tile, flash_attention
from edgeinfer_kernels.cuda.prefill.grouped_kernels import group_assignments_kernel, tiles_kernel
from edgeinfer_kernels.cuda.prefill.prefill_experts import ASSIGNMENTS_PER_STEP
from edgeinfer_kernels.cuda.prefill.prefill_matmul import DEQUANTIZED_BLOCKS, DEQUANTIZING_WARPS
from edgeinfer_kernels.cuda.prefill.prefill_rope import ProjectedHeads, rope_append
from edgeinfer_kernels.cuda.prefill.prefill_rows import ScaledRows, activation_rows, add_norm_rows, norm_rows
from edgeinfer_kernels.cuda.triton_ops.embedding_kernels import dequantize_kernel, embed_rows_kernel
from edgeinfer_kernels.cuda.triton_ops.unpacking import unpack
from edgeinfer_kernels.cuda.tuning.step_shapes import usual_tuning
from edgeinfer_kernels.cuda.tuning.targets import TARGETS, Launch, compile_launch, recorded_launches
from edgeinfer_kernels.cuda.weights.device_block import CACHE_ELEMENTS, DeviceCache
from edgeinfer_kernels.cuda.weights.device_model import DeviceModel
from edgeinfer_kernels.cuda.weights.moe_weights import DeviceExperts
from edgeinfer_kernels.cuda.weights.plane_formats import STREAMED
from edgeinfer_kernels.sizes.cuda_buffers import KEPT, REQUEST_SIZE, SLICE, STATE_WORDS
from edgeinfer_kernels.stages import GPU, cpu_stages
from edgeinfer_offload.planner.layer_placement import LayerPlacement, plan_stages
from edgeinfer_quant_formats import block_format
from harness import suites
from harness.empty_decoders import empty_decoder

NORM = NormSpec("rms", 1e-5)
ROPE = RopeSpec((1.0,), neox=True)
TOKENS, POSITIONS, KV_HEADS, GROUP = 5, 4096, 8, 4
HALF, SINGLE, DOUBLE, WHOLE = torch.float16, torch.float32, torch.float64, torch.int32
BYTES = torch.uint8
OBJECTS_BEFORE_COLLECTION = 200_000
"""A compiler creates many objects and little garbage: Python's default of 700 costs an eighth of the time."""


def empty(*shape: int, dtype: torch.dtype = SINGLE) -> torch.Tensor:
    """A tensor without memory: a recorded launch uses only its type and shape."""
    return torch.empty(shape, dtype=dtype, device="meta")


def prompt_rows(width: int, hidden: int) -> None:
    """The kernels between the matmuls."""
    x, half, scales = empty(TOKENS, width), empty(TOKENS, width, dtype=HALF), empty(TOKENS)
    norm_rows(x, NORM, empty(width), None, half, scales)
    no_norm, norm = NextNorm(NORM, None, None), NextNorm(NORM, empty(width), None)
    add_norm_rows(x, ScaledRows(x, scales), None, no_norm, 1.0, norm, ScaledRows(half, scales))
    both = empty(TOKENS, 2 * hidden)
    out = empty(TOKENS, hidden, dtype=HALF)
    activation_rows(both[:, :hidden], both[:, hidden:], None, None, scales, "silu", out, scales)


def attention(head_dim: int, kind: CacheType, capability: int) -> None:
    """RoPE, prefill attention and context shift on a cache of that type."""
    heads = KV_HEADS * GROUP
    spec = AttentionSpec(heads, KV_HEADS, head_dim, head_dim**-0.5, NORM, None)
    cache = DeviceCache.take(Arena(), KV_HEADS, (head_dim, head_dim), POSITIONS, kind)
    queries = empty(TOKENS, heads, head_dim, dtype=HALF)
    qkv = empty(TOKENS, (heads + 2 * KV_HEADS) * head_dim)
    table, scales = empty(POSITIONS, head_dim), empty(TOKENS)
    words = empty(STATE_WORDS, dtype=WHOLE)
    rope_append(ProjectedHeads(qkv, scales), table, spec, words, queries, cache.args)
    out = empty(TOKENS, heads * head_dim, dtype=HALF)
    tile = attention_tile(head_dim, GROUP, capability, kind != "f16")
    sinks = empty(heads) if kind == "q8_0" else None
    flash_attention(queries, cache.args, words, spec, out, tile, sinks)
    shift_context(cache, table, ShiftedHeads(head_dim, head_dim, has_rope=True), 4, 1024, POSITIONS)


def sent(kind: str, width: int) -> None:
    """Conversion of the host's weights of a format to float16."""
    kind = block_format(kind).repacked_as or kind
    rows, group_bytes = 32, 16 * block_format(kind).row_bytes(width)
    unpack(empty(2 * group_bytes, dtype=BYTES), kind, width, empty(rows, width, dtype=HALF))


def grouped(width: int, hidden: int, capability: int) -> None:
    """Matmul of rows grouped by expert, and their weighted sum."""
    rows, index, tiles = empty(TOKENS, width, dtype=HALF), empty(TOKENS, dtype=WHOLE), empty(9, dtype=WHOLE)
    y, scales, tile = empty(TOKENS, hidden), empty(TOKENS), grouped_tile(capability)
    for chosen in (index, None):
        grouped_product(rows, chosen, empty(2, hidden, width, dtype=HALF), tiles.view(3, 3), y, 0, tile)
    pairs = empty(2 * TOKENS, dtype=WHOLE)
    choice = ExpertRows(pairs, empty(2 * TOKENS), pairs, pairs, pairs)
    group_assignments_kernel[(8,)](
        pairs, empty(2, 8, dtype=WHOLE), pairs, pairs, pairs, pairs, empty(8, dtype=WHOLE), 2 * TOKENS, 3,
        EXPERTS=8, EXPERTS_PER_TOKEN=2, STEP=ASSIGNMENTS_PER_STEP, num_warps=4,
    )  # fmt: skip
    tiles_kernel[(8,)](pairs, pairs, SLOTS=8, PADDED_SLOTS=8, BLOCK_M=16, num_warps=4)
    for bias in (None, empty(8 * width)):
        add_experts(empty(TOKENS, width), scales, bias, choice, empty(TOKENS, width), 0, TOKENS, 0)


def sampling(vocabulary: int, kept: int, piece: int) -> None:
    """Sampling and argmax."""
    buffers = SamplingBuffers.allocate(1, vocabulary, "meta", kept, piece)
    logits, chosen, results = empty(1, vocabulary), empty(1, dtype=WHOLE), empty(1, 2, dtype=WHOLE)
    requests, recent = empty(1, REQUEST_SIZE, dtype=DOUBLE), empty(1, 64, dtype=WHOLE)
    sample(logits, requests, recent, buffers, chosen, results)
    argmax(logits, buffers, chosen, results)


def split_step(shape: Shape, kind: str, tokens: int, capability: int, kv: CacheType) -> None:
    """The decode step of a split model: the feed-forwards, or all experts but one, are on the host."""
    specification, weights = empty_decoder(shape, kind)
    layer = LayerPlacement("gpu", "gpu", neurons=shape.feed_forward)
    if shape.experts:
        layer = LayerPlacement("gpu", "gpu", gpu_experts=(0,), experts=shape.experts)
    stages = plan_stages([layer] * len(specification.layers), "gpu", "cpu")
    arena = Arena()
    model = DeviceModel(specification, weights, arena, POSITIONS, kv=kv, stages=stages)
    exchange_buffer = ExchangeBuffer(
        torch.device("cpu"), tokens, specification.hidden_size, max_experts_per_token(specification)
    )
    launches = StepLaunches(
        model,
        Workspace(model, arena),
        usual_tuning(capability),
        dependent=capability >= DEPENDENT_LAUNCH_FROM,
    )
    exchange = DecodeExchange(cpu_stages(specification, GPU, stages), exchange_buffer)
    DecodeStep(launches, exchange).launch(tokens)


def whole_step(shape: Shape, kind: str, tokens: int, capability: int, kv: CacheType) -> None:
    """The decode step of a model, and the prefill kernels of its matrices."""
    specification, weights = empty_decoder(shape, kind)
    arena, dependent = Arena(), capability >= DEPENDENT_LAUNCH_FROM
    model = DeviceModel(specification, weights, arena, POSITIONS, kv=kv)
    space = Workspace(model, arena)
    step = DecodeStep(StepLaunches(model, space, usual_tuning(capability), dependent=dependent))
    step.launch(tokens)
    sample_best_kernel[(1,)](
        space.best, space.best_ids, space.state, empty(64, dtype=WHOLE),
        PROGRAMS=space.best.shape[1], RING=64, DEPENDENT=dependent, num_warps=8,
        **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
    matrix = model.blocks[1].weights.down
    out = empty(16, matrix.shapes.columns, dtype=HALF)
    dequantize_kernel[(1, 1)](
        matrix.parts, 0, out, 16,
        COLUMNS=matrix.shapes.columns, BLOCKS=matrix.shapes.blocks, STEP=DEQUANTIZED_BLOCKS,
        TILE=matrix.shapes.tile, num_warps=DEQUANTIZING_WARPS,
    )  # fmt: skip
    second = model.blocks[1].weights
    if isinstance(second, DeviceExperts):
        stack = second.stacks.down
        rows, tiles = empty(64, stack.shapes.columns, dtype=HALF), empty(2, 3, dtype=WHOLE)
        for assignments in (16, 32, 64):
            tile = expert_tile(capability, assignments, 1)
            expert_product(rows, None, stack, shape.width, tiles, tile, empty(64, shape.width))
    table = model.embedding
    embed_rows_kernel[(1, 1)](
        table.parts, space.state, space.x, 1.0,
        WIDTH=shape.width, BLOCKS=table.shapes.blocks, TILE=table.shapes.tile,
    )  # fmt: skip


SMALL = Shape("small", 1, 256, 256, 4, 1, 1000, 4096, head_dim=64)
SMALL_EXPERTS = replace(SMALL, name="small, with experts", experts=8, experts_per_token=2)
SMALL_STEPS = {75: ("Q8_0", 1), 80: ("IQ4_XS", 2), 90: ("Q6_K", 1), 120: ("Q4_K_M", 1)}
"""With --smoke, each of some targets compiles a step of another format family, one with several tokens."""
SMALL_CACHES: dict[int, CacheType] = dict.fromkeys((75, 86, 90, 120), "q4_0")
"""With --smoke, the prompts of a target use one quantized cache besides float16: this one, or q8_0."""
SMALL_KV_HEADS = {80: 2, 120: 2}
"""KV heads of steps with --smoke. With two queries per KV head, twice as many KV splits are added at a time
as with four, which takes four times as long to compile.
"""
SMALL_STEP_CACHES: dict[int, CacheType] = {90: "q4_0"}
"""With --smoke, the cache type of the split step; f16 for others."""


def step_launches(capability: int, options: argparse.Namespace) -> Iterator[tuple[str, Launch]]:
    """The kernels of decode steps; those shared by several models are listed once."""
    seen = set()
    if options.smoke:
        kv_heads = SMALL_KV_HEADS.get(capability, SMALL.kv_heads)
        shapes = [replace(shape, kv_heads=kv_heads) for shape in (SMALL, SMALL_EXPERTS)]
        steps = [SMALL_STEPS[capability]] if capability in SMALL_STEPS else []
    else:
        shapes = [find_shape(name) for name in options.shapes.split(",")]
        widths = suites.whole_numbers("--tokens", options.tokens, 1)
        steps = list(product(options.types.split(","), widths))
    for shape, (kind, tokens) in product(shapes, steps):
        with recorded_launches() as launches:
            whole_step(shape, kind, tokens, capability, options.kv)
            kv = SMALL_STEP_CACHES.get(capability, "f16") if options.smoke else options.kv
            split_step(shape, kind, tokens, capability, kv)
        for launch in launches:
            if launch.key not in seen:
                seen.add(launch.key)
                yield f"{shape.name} {kind}, {tokens} tokens", launch


def launches(capability: int, head_dims: tuple[int, ...], smoke: bool) -> Iterator[tuple[str, Launch]]:
    """The kernels of prefill and sampling, with the sizes that they are compiled for."""
    width, hidden = (512, 1024) if smoke else (4096, 14336)
    vocabulary, kept, piece = (1000, 16, 128) if smoke else (128256, KEPT, SLICE)
    groups: list[tuple[str, Callable[[], None]]] = [(f"width {width}", partial(prompt_rows, width, hidden))]
    kinds = ("f16", SMALL_CACHES.get(capability, "q8_0")) if smoke else tuple(CACHE_ELEMENTS)
    for head_dim, kind in product(head_dims, kinds):
        label = f"head of {head_dim}, {kind}"
        groups.append((label, partial(attention, head_dim, kind, capability)))
    groups.append((f"experts of {width}", partial(grouped, width, hidden, capability)))
    for weights in ("Q4_0", "Q6_K", "F16") if smoke else STREAMED:
        groups.append((weights, partial(sent, weights, width)))
    groups.append((f"vocabulary of {vocabulary}", partial(sampling, vocabulary, kept, piece)))
    for label, launch_all in groups:
        with recorded_launches() as recorded:
            launch_all()
        yield from ((label, launch) for launch in recorded)


def main() -> None:
    """Compile all kernels and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", default=",".join(map(str, TARGETS)), help="(%(default)s)")
    parser.add_argument("--head-dims", default="64,128", help="with commas (%(default)s)")
    parser.add_argument("--shapes", default="llama-3-8b,llama-3.2-1b", help="(%(default)s)")
    parser.add_argument("--types", default="Q4_0,Q4_K_M,Q8_0", help="(%(default)s)")
    parser.add_argument("--tokens", default="1,2,4,8", help="tokens of a step (%(default)s)")
    parser.add_argument("--kv", default="f16", choices=CACHE_ELEMENTS, help="a step's cache (%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="small sizes, which compile in seconds")
    options = parser.parse_args()
    gc.freeze()  # imported modules stay
    gc.set_threshold(OBJECTS_BEFORE_COLLECTION)
    head_dims = (32,) if options.smoke else suites.whole_numbers("--head-dims", options.head_dims, 16)
    rows = []
    for capability in suites.whole_numbers("--targets", options.targets, 75):
        labelled_launches = chain(
            launches(capability, head_dims, options.smoke), step_launches(capability, options)
        )
        for label, launch in labelled_launches:
            taken = compile_launch(launch, capability)
            numbers = (taken.warps, taken.registers, taken.spilled_bytes, taken.shared_bytes)
            cells = [*map(str, numbers), "yes" if taken.dependent else "no"]
            rows.append([f"sm_{capability}", launch.name, label, *cells])
    head = ["target", "kernel", "for", "warps", "registers", "spilled bytes", "shared bytes", "dependent"]
    print(markdown(head, rows, left=(0, 1, 2)))


if __name__ == "__main__":
    suites.main(main)
