"""A model on this disk: its files, where they came from, what is known of them."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgeinfer.chat_templates.template_options import DEFAULTS, TemplateOptions
from edgeinfer.registry import use_record

LATER_PART = re.compile(r"-(?!00001-of-)\d{5}-of-\d{5}\.gguf$")
PROJECTOR = re.compile(r"mmproj", re.IGNORECASE)
"""Files beside a model that turn images into tokens, and are none themselves."""

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
    """A model on this disk. What the catalogue doesn't say is None or empty."""

    name: str
    path: Path
    source: Source
    draft_path: Path | None = None
    parameters: str = ""
    context: int | None = None
    licence: str = ""
    notes: str = ""
    prompt_style: Literal["raw", "chat"] | None = None
    """How a bare prompt is best put to this model; None: in its chat template if it has one."""
    template_options: TemplateOptions = DEFAULTS
    """Defaults for its chat template."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the file, all parts of a split model together."""
        return sum(part.stat().st_size for part in parts_of(self.path))

    @property
    def last_used(self) -> float | None:
        """When edgeinfer loaded it last, in seconds since 1970; None: never, as far as is known."""
        return use_record.last_used(self.path)

    def note_use(self) -> None:
        """Record that it is loaded now."""
        use_record.note_use(self.path)


def models_under(folder: Path, pattern: str = "**/*.gguf") -> list[Path]:
    """GGUF files, one for each model: of a split one, the first part; no projectors, no links to nowhere."""
    return sorted(
        path
        for path in folder.glob(pattern)
        if not LATER_PART.search(path.name) and not PROJECTOR.match(path.name) and path.is_file()
    )


def parts_of(path: Path) -> list[Path]:
    """All files of a model whose first part is `path`."""
    first = re.search(r"-00001-of-(\d{5})\.gguf$", path.name)
    if first is None:
        return [path]
    return sorted(path.parent.glob(f"{path.name[: first.start()]}-*-of-{first[1]}.gguf"))
