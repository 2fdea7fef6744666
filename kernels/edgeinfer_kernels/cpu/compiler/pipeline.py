"""A reduced numba pipeline with only the passes that kernels need: numbers, loops and calls.

The default pipeline also looks for closures, `with`, literal unrolling, generated functions and array
expressions in every function, and types every operator as an array operator first. This takes a quarter of
its time. The machine code is the same without these passes.
"""

from typing import Any

from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import PassManager
from numba.core.typed_passes import (
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)
from numba.core.typing.npydecl import NumpyRulesArrayOperator
from numba.core.untyped_passes import (
    DeadBranchPrune,
    FixupArgs,
    GenericRewrites,
    IRProcessing,
    ReconstructSSA,
    RewriteSemanticConstants,
    TranslateByteCode,
)

PASSES = (
    TranslateByteCode,
    FixupArgs,
    IRProcessing,
    RewriteSemanticConstants,
    DeadBranchPrune,
    GenericRewrites,
    ReconstructSSA,
    NopythonTypeInference,
    PreLowerStripPhis,
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
)


class KernelCompiler(CompilerBase):
    """The compiler passes of a kernel."""

    def define_pipelines(self) -> list[Any]:
        """One pipeline only."""
        passes = PassManager("kernel")
        for each in PASSES:
            passes.add_pass(each, each.__name__)
        passes.finalize()
        return [passes]


def forget_arrays() -> None:
    """Patch numba to type operators without the numpy candidates: kernels have no arrays."""
    NumpyRulesArrayOperator.generic = lambda rules, arguments, keywords: None
