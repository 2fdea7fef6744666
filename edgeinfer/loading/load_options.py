"""Options of `load`, validated."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edgeinfer.chat_templates.template_options import DEFAULTS, TemplateOptions
from edgeinfer.engine.protocols import Progress
from edgeinfer.errors import SettingError
from edgeinfer.shown import shown
from edgeinfer_kernels.layer_cache import CacheType

MAX_THREADS = max(64, 2 * (os.cpu_count() or 1))
"""Threads spin at barriers: far more threads than processors would block the machine."""
MAX_LEAVES = 8
EngineName = Literal["edgeinfer", "llama.cpp"]
Sparse = Literal["auto", "exact", "predicted", "off"]
CHOICES: dict[str, tuple[Any, ...]] = {
    "kv": ("f16", "f32", "q8_0", "q4_0"),
    "engine": ("edgeinfer", "llama.cpp"),
    "sparse": ("auto", "exact", "predicted", "off"),
}


def is_device(name: str) -> bool:
    """Whether `name` is a device name for `load`: "auto", "cpu", "cuda", "cuda:N"."""
    return name in ("auto", "cpu") or re.fullmatch(r"cuda(:\d{1,2})?", name) is not None


def check_load_options(context: int | None, threads: int | None, draft: str | None) -> None:
    """Raise `SettingError` for values that neither loading nor planning accepts."""
    for name, value in (("context", context), ("threads", threads)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise SettingError(f"{name}: saw {shown(value)}, wanted a whole number of at least 1, or None")
    if threads is not None and threads > MAX_THREADS:
        raise SettingError(f"threads: saw {threads}, wanted {MAX_THREADS} at most")
    if draft is not None and (not isinstance(draft, str) or draft.lower() in ("", "none")):
        raise SettingError(f"draft: saw {shown(draft)}, wanted 'auto', 'lookup', 'self', a model, or None")


@dataclass(frozen=True)
class LoadOptions:
    """Validated options of `load`."""

    context: int | None = None
    device: str = "auto"
    vram: int | None = None
    """Maximum bytes of GPU memory to use."""
    ram: int | None = None
    """Maximum bytes of main memory to use."""
    threads: int | None = None
    repack: bool = True
    sparse: Sparse = "auto"
    """Whether the CPU reads only active neurons, see `sparse_choice`."""
    instruction_set: str | None = None
    draft: str | None = "auto"
    draft_leaves: int = 0
    """Number of tree siblings of a draft."""
    references: tuple[Path, ...] = ()
    """Lookup files: text that the completion may repeat."""
    kv: CacheType = "f16"
    engine: EngineName = "edgeinfer"
    chat_template: str | None = None
    assume_pre_tokenizer: str | None = None
    template_options: TemplateOptions = DEFAULTS
    snapshots: bool = False
    progress: Progress | None = None
    build_progress: Progress | None = None

    @property
    def drafts_on_gpu(self) -> bool:
        """Whether to draft for a model on a GPU: only on request, because a step of several tokens isn't
        bit-identical there.
        """
        return bool(self.references) or self.draft not in (None, "auto")

    @property
    def asks_sparse(self) -> bool:
        """Whether layers are sparse independent of the profile."""
        return self.sparse in ("exact", "predicted")

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                listed = ", ".join("None" if choice is None else repr(choice) for choice in choices)
                raise SettingError(f"{name}: saw {shown(value)}, wanted one of {listed}")
        for name in ("instruction_set", "chat_template", "assume_pre_tokenizer"):
            if not isinstance(getattr(self, name), str | None):
                raise SettingError(f"{name}: saw {shown(getattr(self, name))}, wanted a text, or None")
        for name in ("progress", "build_progress"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise SettingError(f"{name}: saw {shown(getattr(self, name))}, wanted a function, or None")
        if not isinstance(self.snapshots, bool):
            raise SettingError(f"snapshots: saw {shown(self.snapshots)}, wanted True or False")
        if not isinstance(self.device, str) or not is_device(self.device):
            raise SettingError(f"device: saw {shown(self.device)}, wanted 'auto', 'cpu', 'cuda' or 'cuda:N'")
        check_load_options(self.context, self.threads, self.draft)
        if isinstance(self.draft_leaves, bool) or self.draft_leaves not in range(MAX_LEAVES + 1):
            raise SettingError(
                f"draft_leaves: saw {shown(self.draft_leaves)}, wanted a whole number from 0 to {MAX_LEAVES}"
            )
        if self.references and self.draft is None:
            raise SettingError(
                "references: they are for drafts; leave them out, or take draft 'auto' or 'lookup'"
            )
        if self.references and self.engine == "llama.cpp":
            raise SettingError("references: llama.cpp drafts nothing here; leave them out, or the engine")
        if not isinstance(self.repack, bool):
            raise SettingError(f"repack: saw {shown(self.repack)}, wanted True or False")
        if self.asks_sparse and self.engine == "llama.cpp":
            raise SettingError(f"sparse: {self.sparse!r} is for our kernels; leave it out, or the engine")
        if self.engine == "llama.cpp" and not self.repack:
            raise SettingError("repack: llama.cpp decides that by itself; leave it out, or the engine")
        if self.engine == "llama.cpp" and self.device.startswith("cuda"):
            raise SettingError("device: llama.cpp runs on the CPU here; leave it out, or the engine")
        if self.engine == "llama.cpp" and self.ram is not None:
            raise SettingError("ram: llama.cpp keeps to no budget; leave it out, or the engine")
