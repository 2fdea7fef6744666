"""A model on this disk: its files, their source, and its registry data."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from edgeinfer.chat_templates.template_options import DEFAULTS, TemplateOptions
from edgeinfer.registry import use_record

LATER_PART = re.compile(r"-(?!00001-of-)\d{5}-of-\d{5}\.gguf$")
PROJECTOR = re.compile(r"mmproj", re.IGNORECASE)
"""Matches multimodal projectors, which turn images into embeddings and are not models."""
DRAFT_PREFIXES = ("mtp-", "dflash-", "dspark-", "eagle3-")
"""Of the files of drafts, as llama.cpp's converters name them: no models that run alone. In the order in
which they are tried."""

_LABEL = re.compile(
    r"(?:^|[-._/])(?P<label>(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ[12]_0|MXFP4(?:_MOE)?|BF16|F16|F32))"
    r"(?=$|[-./]|-\d{5}-of-)",
    re.IGNORECASE | re.ASCII,
)
FLOATS = ("F32", "BF16", "F16")

Source = Literal[
    "built in",
    "models.toml",
    "models folder",
    "path",
    "Hugging Face cache",
    "LM Studio",
    "llama.cpp",
    "Ollama",
]


@dataclass(frozen=True)
class ModelFile:
    """A model on this disk. Values missing in the registry are None or empty."""

    name: str
    path: Path
    source: Source
    draft_path: Path | None = None
    head_path: Path | None = None
    """Its draft head, if that has a separate file."""
    parameters: str = ""
    context: int | None = None
    licence: str = ""
    notes: str = ""
    prompt_style: Literal["raw", "chat"] | None = None
    """How a plain prompt is passed to this model; None: through its chat template if it has one."""
    template_options: TemplateOptions = DEFAULTS
    """Default options of its chat template."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of sampling parameters, by name."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the file, or of all parts of a multi-part model."""
        return sum(part.stat().st_size for part in parts_of(self.path))

    @property
    def last_used(self) -> float | None:
        """When edgeinfer loaded it last, in seconds since 1970; None: unknown."""
        return use_record.last_used(self.path)

    def record_use(self) -> None:
        """Record the current time as its last use."""
        use_record.record_use(self.path)


def models_under(folder: Path, pattern: str = "**/*.gguf", *, drafts: bool = False) -> list[Path]:
    """GGUF files, one per model: the first part of a multi-part model; no projectors, no broken links, and
    files named as drafts only with `drafts`.
    """
    return sorted(
        path
        for path in folder.glob(pattern)
        if not LATER_PART.search(path.name)
        and not PROJECTOR.match(path.name)
        and (drafts or not path.name.startswith(DRAFT_PREFIXES))
        and path.is_file()
    )


def parts_of(path: Path) -> list[Path]:
    """All files of a model whose first part is `path`, or of a folder's."""
    if path.is_dir():
        return sorted(path.glob("*.safetensors"))
    first = re.search(r"-00001-of-(\d{5})\.gguf$", path.name)
    if first is None:
        return [path]
    return sorted(path.parent.glob(f"{path.name[: first.start()]}-*-of-{first[1]}.gguf"))


def quant_of(file_name: str) -> str:
    """The quantization in a file's name or its folder's, in capitals; "" if there is none.

    "Qwen3-8B-Q4_K_M.gguf" -> "Q4_K_M"; "UD-Q4_K_XL/big-00001-of-00002.gguf" -> "UD-Q4_K_XL".
    """
    labels = _LABEL.findall(file_name.removesuffix(".gguf"))
    return str(labels[-1]).upper() if labels else ""


def bits_of(label: str) -> float:
    """Approximate bits per weight from the name: "Q4_K_M" -> 4; 16 and 32 for the float types."""
    plain = label.removeprefix("UD-")
    if plain in FLOATS:
        return 32 if plain == "F32" else 16
    digits = re.search(r"\d", plain)
    return float(digits[0]) if digits else 16
