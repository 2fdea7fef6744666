"""Compiles the kernels that read weights, in types that no mix of the quantizer has, for a GPU that needn't
be there, and prints their resources.
"""

import sys

import torch

from edgeinfer_kernels.cuda.prefill.expert_matmul import expert_product, expert_tile
from edgeinfer_kernels.cuda.prefill.prefill_matmul import DEQUANTIZED_BLOCKS, DEQUANTIZING_WARPS
from edgeinfer_kernels.cuda.triton_ops.embedding_kernels import dequantize_kernel, embed_rows_kernel
from edgeinfer_kernels.cuda.triton_ops.unpacking import unpack
from edgeinfer_kernels.cuda.tuning.targets import compile_launch, recorded_launches
from edgeinfer_kernels.cuda.weights.plane_formats import STREAMED
from edgeinfer_quant_formats import block_format
from tests.kernels.cuda.decode.compile_gemma_kernels import FLOATS, GRID, WORDS, tensor
from tests.kernels.cuda.decode.compile_lora_kernels import WIDTH, launch_step, matrix


def launch_prompt(kind: str, capability: int) -> None:
    """The kernels that decode weights for prompts: of a matrix, of experts, of the host's rows."""
    weights = matrix(kind)
    half, blocks, tile = tensor(16, WIDTH, dtype=torch.float16), weights.shapes.blocks, weights.shapes.tile
    dequantize_kernel[GRID](
        weights.parts, 0, half, 16, COLUMNS=WIDTH, BLOCKS=blocks, STEP=DEQUANTIZED_BLOCKS, TILE=tile,
        num_warps=DEQUANTIZING_WARPS,
    )  # fmt: skip
    embed_rows_kernel[GRID](weights.parts, WORDS, FLOATS, 1.0, WIDTH=WIDTH, BLOCKS=blocks, TILE=tile)
    rows, tiles = tensor(64, WIDTH, dtype=torch.float16), tensor(2, 3, dtype=torch.int32)
    expert_product(rows, None, weights, 512, tiles, expert_tile(capability, 64, 1), tensor(64, 512))
    if kind not in STREAMED:
        return
    in_memory = block_format(kind).repacked_as or kind
    raw = tensor(16 * block_format(in_memory).row_bytes(WIDTH), dtype=torch.uint8)
    unpack(raw, in_memory, WIDTH, half)


def main() -> None:
    capability = int(sys.argv[1])
    for kind in ("NVFP4", "Q2_0", "TQ1_0", "IQ2_XS"):
        with recorded_launches() as launches:
            for tokens in (1, 8):
                launch_step(kind, 0, tokens, capability)
            launch_prompt(kind, capability)
        for launch in {launch.key: launch for launch in launches}.values():
            print(launch.name, kind, compile_launch(launch, capability), flush=True)


if __name__ == "__main__":
    main()
