"""Compiles the kernels of a decode step with LoRA adapters for a GPU that needn't be there, and prints their
resources.
"""

import sys
from types import SimpleNamespace
from typing import Any

import torch

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.decode.step_norms import Source
from edgeinfer_kernels.cuda.decode.workspace import Activations
from edgeinfer_kernels.cuda.lora import DeviceLora, EmbeddingLora
from edgeinfer_kernels.cuda.prefill.expert_kernels import (
    expert_down_kernel,
    expert_gated_kernel,
    expert_products_kernel,
)
from edgeinfer_kernels.cuda.triton_ops.kernel_args import (
    DownConfig,
    GatedConfig,
    GemvConfig,
    SourceConfig,
    SumSquares,
    WordsConfig,
)
from edgeinfer_kernels.cuda.tuning.step_shapes import usual_tuning
from edgeinfer_kernels.cuda.tuning.targets import compile_launch, recorded_launches
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.plane_formats import PlaneShapes
from tests.kernels.cuda.decode.compile_gemma_kernels import FLOATS, GRID, WORDS, tensor

WIDTH, VOCABULARY = 4096, 32000


def matrix(kind: str, rows: int = WIDTH) -> DeviceMatrix:
    return DeviceMatrix(PlaneShapes.of("", kind, rows, WIDTH), kind, WORDS, WORDS, WORDS)


def adapter(ranks: int) -> DeviceLora:
    a = matrix("Q8_0", ranks)
    return DeviceLora(a, tensor(ranks, WIDTH, dtype=torch.float16), tensor(WIDTH, ranks), tensor(8, ranks))


def launch_step(kind: str, ranks: int, tokens: int, capability: int) -> None:
    """The kernels that multiply matrices, with adapters and that of the embedding unless `ranks` is 0."""
    matrices = q, k, gate, up, down, head = [matrix(kind) for _ in range(5)] + [matrix(kind, VOCABULARY)]
    spec = SimpleNamespace(hidden_size=WIDTH, vocabulary_size=VOCABULARY, logit_scale=1.0, logit_soft_cap=0.0)
    spec.embedding_scale = 1.0
    model: Any = SimpleNamespace(
        lora={id(each): adapter(ranks) for each in matrices if ranks},
        embedding=head,
        embedding_lora=EmbeddingLora(tensor(ranks, WIDTH), tensor(VOCABULARY, ranks)),
        spec=spec,
        head=head,
        head_bias=None,
    )
    space: Any = SimpleNamespace(
        nothing=WORDS,
        state=WORDS,
        x=FLOATS,
        y=FLOATS,
        arrived=WORDS,
        own_logits=FLOATS,
        best=FLOATS,
        best_ids=WORDS,
    )
    launches = StepLaunches(model, space, usual_tuning(capability), dependent=capability >= 90)
    rows = Activations(WORDS, 12, 128)
    source = Source(rows, tensor(8, WIDTH // 16), NormSpec("rms", 1e-5))
    ffn: Any = SimpleNamespace(gate=gate, up=up, gate_bias=None, up_bias=None)
    if ranks:
        launches.embed(None, rows, tensor(8, WIDTH // 16), tokens)
    launches.rows((q, k), source, tensor(8, 2 * WIDTH), None, "qkv", tokens)
    launches.gated("silu", ffn, source, rows, tokens)
    launches.residual(down, None, rows, 1.0, FLOATS, source, "down", tokens)
    launches.head(source, tokens)


def launch_experts(ranks: int) -> None:
    """The kernels of experts with adapters."""
    shapes, rows = PlaneShapes.of("", "Q4_0", 768, 2048), WordsConfig(64, 12)
    tile, planes = shapes.tile._replace(rank=ranks), (WORDS, WORDS, WORDS)
    parts = (*planes, FLOATS, FLOATS)
    squares = SumSquares(FLOATS, 1e-5)
    options: dict[str, Any] = {"DEPENDENT": False, "num_warps": 1}
    expert_products_kernel[GRID](
        planes, WORDS, FLOATS, WORDS, ASSIGNMENTS=8, READ=rows, GEMV=GemvConfig(64, 64, 1),
        TILE=PlaneShapes.of("", "Q8_0", ranks, 2048).tile, RANK=ranks, **options,
    )  # fmt: skip
    expert_gated_kernel[GRID](
        parts, parts, WORDS, WORDS, WORDS, WORDS, WORDS, FLOATS, squares, EXPERT_ROWS=768,
        EXPERTS_PER_TOKEN=8, HIDDEN=WordsConfig(24, 12), GATED=GatedConfig(tile, tile, True, False, 1),
        SOURCE=SourceConfig(64, 12, 1, 128, 2048), GEMV=GemvConfig(64, 64, 1), **options,
    )  # fmt: skip
    expert_down_kernel[GRID](
        parts, WORDS, FLOATS, 2048, WORDS, WORDS, FLOATS, WORDS, WIDTH=2048, EXPERTS_PER_TOKEN=8,
        READ=WordsConfig(24, 12), GEMV=GemvConfig(32, 32, 1), DOWN=DownConfig(tile, False, 0, False),
        **options,
    )  # fmt: skip


def main() -> None:
    capability = int(sys.argv[1])
    with recorded_launches() as launches:
        launch_experts(32)
    for launch in launches:
        print(launch.name, "experts", compile_launch(launch, capability), flush=True)
    for kind, ranks, tokens in (("Q4_K", 16, 1), ("Q4_K", 192, 8), ("Q6_K", 48, 4), ("Q8_0", 64, 1)):
        with recorded_launches() as launches:
            launch_step(kind, ranks, tokens, capability)
        for launch in {launch.key: launch for launch in launches}.values():
            print(launch.name, kind, compile_launch(launch, capability), flush=True)


if __name__ == "__main__":
    main()
