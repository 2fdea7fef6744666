"""What numba does with a kernel: as little as kernels need, which are numbers, loops and calls.

numba's own pipeline also looks for closures, `with`, literals to unroll, generated functions to inline and
array expressions, in every function, and types every operator as one of arrays first; a fourth of its time.
The machine code is the same without.
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
    """The passes that a kernel goes through."""

    def define_pipelines(self) -> list[Any]:
        """One pipeline and no other behind it."""
        passes = PassManager("kernel")
        for each in PASSES:
            passes.add_pass(each, each.__name__)
        passes.finalize()
        return [passes]


def forget_arrays() -> None:
    """Have numba type operators without asking first whether they are numpy's: kernels have no arrays."""
    NumpyRulesArrayOperator.generic = lambda rules, arguments, keywords: None
