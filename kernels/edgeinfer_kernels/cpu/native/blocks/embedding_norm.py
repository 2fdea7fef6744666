"""The norm of the embedding."""

from edgeinfer_kernels.cpu.native.blocks.phases import (
    normalize,
)
from edgeinfer_kernels.cpu.native.blocks.thread_pool import (
    next_token,
)
from edgeinfer_kernels.cpu.native.simd.exports import Exports
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs
from edgeinfer_kernels.cpu.runtime.recurrent_args import (
    EmbeddingNormArgs,
)

exports = Exports()


@exports.add("embedding_norm_block", EmbeddingNormArgs, StepArgs, ThreadPoolArgs, int)
def embedding_norm_block(block, step_args, pool, thread):
    """x ← norm(x)."""
    tokens = step_args.tokens
    token = thread
    while token < tokens:
        x = step_args.x + token * step_args.x_stride
        normalize(block.norm, x, x)
        token = next_token(pool, 0, tokens, token)
