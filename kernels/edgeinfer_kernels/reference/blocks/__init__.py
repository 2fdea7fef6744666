"""The formula of each block kind in numpy, in a module of the kind's name: `forward(block, h, step)`."""

from collections.abc import Callable
from importlib import import_module

from edgeinfer_kernels.reference.step import Array, BlockStep

Forward = Callable[[BlockStep, Array], Array]


def forward_of(kind: str) -> Forward:
    """The formula of a block kind."""
    function: Forward = import_module(f"{__name__}.{kind}").forward
    return function
