"""What Triton compiles kernels for: NVIDIA's GPUs (PTX), AMD's (torch's HIP build), or its interpreter.

Device functions with inline PTX have a twin of ordinary operations, for the interpreter and for AMD. That for
AMD is experimental: it compiles for several GPUs in tests, and no GPU has run it.
"""

import torch
import triton
import triton.language as tl

HAS_HIP = torch.version.hip is not None
"""Whether torch is built for AMD's GPUs."""
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""The interpreter cannot run inline assembly: kernels then compute the same with ordinary operations."""
USES_PTX = tl.constexpr(not triton.knobs.runtime.interpret and not HAS_HIP)
SIGNED_DOT_GPUS = ("gfx906", "gfx908", "gfx90a", "gfx94", "gfx95", "gfx103")


def _amd_dot() -> str:
    """The instruction of this AMD GPU that adds four products of int8; empty: another GPU, or the
    interpreter.
    """
    if triton.knobs.runtime.interpret or not HAS_HIP or not torch.cuda.is_available():
        return ""
    architecture = str(torch.cuda.get_device_properties(0).gcnArchName)
    if architecture.startswith(("gfx11", "gfx12")):
        return "v_dot4_i32_iu8 $0, $1, $2, $3 neg_lo:[1,1,0]"
    return "v_dot4_i32_i8 $0, $1, $2, $3" if architecture.startswith(SIGNED_DOT_GPUS) else ""


AMD_DOT = tl.constexpr(_amd_dot())
PRECISE = tl.constexpr("ieee" if HAS_HIP else "tf32x3")
"""The precision of a product of float32 tiles that keeps nearly all bits."""
