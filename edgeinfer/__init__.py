"""edgeinfer: run a language model on your own machine.

import edgeinfer
with edgeinfer.load("tiny") as model:
    print(model.generate("Once upon a time", max_tokens=64).text)
"""

from typing import TYPE_CHECKING, Any

from edgeinfer.chat import Chat
from edgeinfer.errors import EdgeInferError
from edgeinfer.loading.loading import load
from edgeinfer.model import Model
from edgeinfer.results import Generation, Speed, Token

if TYPE_CHECKING:
    from edgeinfer.quantizing import Quantization, quantize

__all__ = [
    "Chat",
    "EdgeInferError",
    "Generation",
    "Model",
    "Quantization",
    "Speed",
    "Token",
    "load",
    "quantize",
]


def __getattr__(name: str) -> Any:
    """Import rarely used modules on first access."""
    if name in ("Quantization", "quantize"):
        from edgeinfer import quantizing

        return getattr(quantizing, name)
    raise AttributeError(f"module 'edgeinfer' has no attribute {name!r}")
