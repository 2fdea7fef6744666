"""edgeinfer: run a language model on the machine in front of you.

import edgeinfer
with edgeinfer.load("tiny") as model:
    print(model.generate("Once upon a time", max_tokens=64).text)
"""

from edgeinfer.errors import EdgeInferError
from edgeinfer.loading import load
from edgeinfer.model import Model
from edgeinfer.quantizing import Quantization, quantize
from edgeinfer.results import Generation, Speed, Token
from edgeinfer.session import Chat

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
