"""edgeinfer: run a language model on your own machine.

import edgeinfer
with edgeinfer.load("tiny") as model:
    print(model.generate("Once upon a time", max_tokens=64).text)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgeinfer import errors, options, tokenizer
    from edgeinfer.bundling import bundle_neurons
    from edgeinfer.chat import Chat
    from edgeinfer.chat_templates.tool_calls import ParsedReply, ToolCall, parse_tool_calls
    from edgeinfer.download.pulling import PulledModel, pull
    from edgeinfer.engine.hidden_states import HiddenStep
    from edgeinfer.errors import EdgeInferError
    from edgeinfer.loading.loading import load
    from edgeinfer.model import Model
    from edgeinfer.options import LoadOptions, RunOptions, SamplingParams
    from edgeinfer.quantizing import Quantization, convert, quantize
    from edgeinfer.results import Generation, Speed, Token, majority
    from edgeinfer.speculation.drafter import Draft, Drafter, DraftRequest

__all__ = [
    "Chat",
    "Draft",
    "DraftRequest",
    "Drafter",
    "EdgeInferError",
    "Generation",
    "HiddenStep",
    "LoadOptions",
    "Model",
    "ParsedReply",
    "PulledModel",
    "Quantization",
    "RunOptions",
    "SamplingParams",
    "Speed",
    "Token",
    "ToolCall",
    "bundle_neurons",
    "convert",
    "errors",
    "load",
    "majority",
    "options",
    "parse_tool_calls",
    "pull",
    "quantize",
    "tokenizer",
]

_MODULES = {
    "Chat": "chat",
    "Draft": "speculation.drafter",
    "DraftRequest": "speculation.drafter",
    "Drafter": "speculation.drafter",
    "EdgeInferError": "errors",
    "Generation": "results",
    "HiddenStep": "engine.hidden_states",
    "LoadOptions": "options",
    "Model": "model",
    "ParsedReply": "chat_templates.tool_calls",
    "PulledModel": "download.pulling",
    "Quantization": "quantizing",
    "RunOptions": "options",
    "SamplingParams": "options",
    "Speed": "results",
    "Token": "results",
    "ToolCall": "chat_templates.tool_calls",
    "bundle_neurons": "bundling",
    "convert": "quantizing",
    "load": "loading.loading",
    "majority": "results",
    "parse_tool_calls": "chat_templates.tool_calls",
    "pull": "download.pulling",
    "quantize": "quantizing",
}
"""Public name -> the module that defines it."""


def __getattr__(name: str) -> Any:
    """Import a public name on first access, so that `import edgeinfer` loads no engine."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"edgeinfer.{_MODULES[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"edgeinfer.{name}")
    raise AttributeError(f"module 'edgeinfer' has no attribute {name!r}")
