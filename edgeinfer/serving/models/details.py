"""Details of a model from its file's header: architecture, quantization, chat template, capabilities."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from edgeinfer.chat_templates.chat_format import ChatFormat
from edgeinfer.chat_templates.template_options import thinking_levels
from edgeinfer.errors import ChatTemplateError
from edgeinfer.registry.model_file import quant_of
from edgeinfer.serving.models.models import ModelCard
from edgeinfer_quant_formats import GGUFFile
from edgeinfer_quant_formats.errors import FormatError

MAX_KEPT = 256
_TEMPLATE = "tokenizer.chat_template"


@dataclass(frozen=True)
class ModelDetails:
    """`metadata`: that of the header, without lists; `capabilities`: in Ollama's words."""

    architecture: str = ""
    quantization: str = ""
    template: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    capabilities: tuple[str, ...] = ("completion",)


def details_of(card: ModelCard) -> ModelDetails:
    """The details of a model; empty if its file isn't known or can't be read."""
    return ModelDetails() if card.path is None else _details(card.path, card.modified)


@lru_cache(MAX_KEPT)
def _details(path: Path, modified: float) -> ModelDetails:
    try:
        with GGUFFile.open(path) as file:
            values = {name: value for name, value in file.metadata.items() if _is_plain(value)}
    except (FormatError, OSError):
        return ModelDetails()
    architecture = str(values.get("general.architecture", ""))
    template = str(values.get(_TEMPLATE, ""))
    is_encoder = f"{architecture}.pooling_type" in values and not template
    return ModelDetails(
        architecture,
        quant_of(path.name),
        template,
        {name: value for name, value in values.items() if name != _TEMPLATE},
        ("embedding",) if is_encoder else ("completion", *_of_template(template)),
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool)


def _of_template(template: str) -> tuple[str, ...]:
    """Tools and thinking, if the template has variables for them."""
    if not template:
        return ()
    try:
        variables = ChatFormat(template).variables()
    except ChatTemplateError:
        return ()
    tools = ("tools",) if "tools" in variables else ()
    return (*tools, "thinking") if thinking_levels(variables) else tools
