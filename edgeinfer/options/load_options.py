"""Options of `load`."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Required, Self, TypedDict

from edgeinfer.chat_templates.template_options import TemplateOptions, Thinking
from edgeinfer.errors import SettingError, shown
from edgeinfer.options.device_budgets import device_names, is_device, parse_budgets, parse_bytes
from edgeinfer.options.lora_option import GivenLora, LoraChoice, lora_choices
from edgeinfer.options.option_field import (
    Progress,
    check_names,
    check_options,
    option,
    options_from,
    whole,
)
from edgeinfer.speculation.drafter import Drafter
from edgeinfer_kernels.caches.cache_types import ELEMENT_TYPES, CacheType, element_types, has_recent

MAX_THREADS = max(64, 2 * (os.cpu_count() or 1))
"""Threads spin at barriers: far more threads than processors would block the machine."""
MAX_TREE_WIDTH = 8
MAX_PARALLEL = 64
LocalEngine = Literal["edgeinfer", "llama.cpp"]
EngineName = Literal["edgeinfer", "llama.cpp", "openai"]
Sparse = Literal["auto", "exact", "predicted", "off"]
Split = Literal["auto", "tensor", "layers"]
MODEL = "Model and devices"
PROMPT = "Prompt"
ENDPOINT_OPTIONS = (
    *("engine", "base_url", "key", "context", "thinking", "template_args", "snapshots", "parallel"),
    *("progress", "build_progress"),
)
"""Options for a model on a server."""


class CacheTypes:
    """The types of a KV cache."""

    def holds(self, value: object) -> bool:
        try:
            types = element_types(value) if isinstance(value, str) else ()
            return bool(types) and not (has_recent(str(value)) and set(types) <= {"f32", "f16"})
        except ValueError:
            return False

    def __str__(self) -> str:
        names = ", ".join(map(repr, ELEMENT_TYPES))
        return (
            f"one of {names}, or two of them for keys and values, as 'q8_0/q4_0'; +f16 after one of few "
            "bits: with recent positions in f16"
        )


def _draft(name: str, draft: Any) -> Any:
    draft = str(draft) if isinstance(draft, Path) else draft
    if draft is None or isinstance(draft, Drafter):
        return draft
    if not isinstance(draft, str) or draft.lower() in ("", "none"):
        expected = "'auto', 'mtp', 'lookup', 'self', a model, a Drafter, or None"
        raise SettingError(f"{name}: saw {shown(draft)}, wanted {expected}")
    return draft


def _paths(name: str, given: str | Path | Iterable[str | Path]) -> tuple[Path, ...]:
    listed = (given,) if isinstance(given, str | Path) else given
    try:
        return tuple(map(Path, listed))
    except TypeError:
        raise SettingError(f"{name}: saw {shown(given)}, wanted paths of text files") from None


_option = partial(option, panel=MODEL, commands="run chat serve batch")


@dataclass(frozen=True, eq=False)
class LoadOptions:
    """Options of `load`.

    - `context`: tokens of prompt and completion together; None: the trained context, 4096 at most.
    - `engine` "openai": the model is on a server with OpenAI's API at `base_url`, which gets `key` as a
      bearer token; options about this machine's memory and devices aren't for it.
    - `device`: "auto" (the GPUs, and the CPU for what doesn't fit), "cpu", "cuda", "cuda:N", or several
      GPUs as "cuda:0,cuda:1".
    - `split`: what each of several GPUs gets: a part of every layer ("tensor", for which each has a process),
      or consecutive "layers", if no GPU alone holds the model. "auto": what is predicted to decode fastest.
    - `vram`, `ram`: budgets in bytes or as "8GiB"; None: what is free now. `vram` of several GPUs: one for
      each, as "8GiB,4GiB" or a list.
    - `threads`: None: the count that reads memory fastest, measured once.
    - `repack`: False keeps the weights memory-mapped, which takes almost no memory. Decoding then has about a
      third of the speed; prefill is as fast. Weights that don't fit main memory at any context always stay
      memory-mapped, with a warning.
    - `sparse`, for models with a ReLU, on the CPU or for the part there: "exact" reads only the weights of
      active neurons while steps are short, which changes at most the rounding. "auto" does so if the profile
      from `edgeinfer profile` predicts a gain; next to a GPU, if the plan with it is faster. "predicted" also
      predicts which neurons are active; "off" disables it.
    - `count_activity`: count which neurons the prompts of a large ReLU model activate, unless all of it is on
      a GPU, and keep the counts as a profile in the user's data folder: no text. A profile of `edgeinfer
      profile` is never changed.
    - `draft`: the drafter. "auto" (the model's draft head, else the registry's draft model for it, else
      "lookup"), "mtp" (the draft head), "lookup" (prompt lookup), "self" (the model with half of its layers),
      a name or path of a draft head or of a small model with the same vocabulary, or None.
    - `draft_tree_width`: how many tokens besides the most probable one a draft model or a draft head may
      propose after each token, on one GPU, the CPU, or both: its drafts are trees then. 0: chains.
    - `lookup_files`: text that the completion is likely to repeat, such as code to edit. Prompt lookup
      searches them first.
    - `lora`: LoRA adapters, GGUF files or PEFT folders: a path, "PATH:SCALE", (path, scale), or several.
    - `instruction_set`: one that `edgeinfer doctor` lists; None: the best.
    - `parallel`: requests whose KV caches (or recurrent states) are held at once, each of the whole context,
      on the CPU; 0: automatic.
    - `spill`, `spill_disk`: bytes, or as "2GiB", of main memory and of the disk for the prefixes of idle
      requests that the KV cache has no place for. `spill` None: what is free, with several requests.
    - `chat_template`: Jinja text that replaces the file's.
    - `thinking`, `template_args`: defaults for all completions, as in `RunOptions`; without them those of
      models.toml.
    - `assume_pre_tokenizer`: use this one if the file's is unknown.
    - `snapshots`: restore prompt prefixes that `Model.keep_snapshot` saved to disk.
    - `progress` is called with bytes loaded, `build_progress` with kernels compiled (first use only).

    Raises:
        SettingError: a value out of range, or options that exclude each other.
    """

    context: int | None = _option(
        None, "Context size (num_ctx): maximum tokens of prompt and completion.", allowed=whole(1),
        flags=("--context", "-c"),
        commands="run chat serve batch plan embed rank", default_note="as trained, at most 4096", common=True,
    )  # fmt: skip
    engine: EngineName = _option(
        "edgeinfer", "llama.cpp runs models that edgeinfer can't: pip install 'edgeinfer[llama-cpp]'. "
        "openai: a server with OpenAI's API at --base-url has the model.",
        commands="run chat serve batch pull",
    )  # fmt: skip
    base_url: str | None = _option(
        None, "With --engine openai: the server's address, as http://127.0.0.1:8000/v1.", metavar="URL",
        commands="run chat batch",
    )  # fmt: skip
    key: str | None = _option(
        None, "With --engine openai: the server's API key, or EDGEINFER_KEY.", metavar="KEY",
        commands="run chat batch", is_secret=True,
    )  # fmt: skip
    device: str = _option(
        "auto", "auto: the GPU, with the CPU for what doesn't fit; or cpu, cuda, cuda:N, cuda:0,cuda:1.",
        metavar="DEVICE",
        commands="run chat serve batch bench eval embed rank", common=True,
    )  # fmt: skip
    split: Split = _option(
        "auto", "Several GPUs: tensor parallel, or layers.",
        commands="run chat serve batch plan bench",
    )  # fmt: skip
    vram: int | tuple[int, ...] | None = _option(
        None, "Maximum GPU memory, as 8GiB, or of each GPU, as 8GiB,4GiB. Layers and MoE experts beyond "
        "that of one GPU are on the CPU (offload).", argument="size", convert=parse_budgets, metavar="SIZE",
        commands="run chat serve batch plan bench embed rank", default_note="what is free", common=True,
    )  # fmt: skip
    ram: int | None = _option(
        None, "Maximum main memory, as 12GiB. Weights beyond it are read from the disk.", argument="size",
        convert=parse_bytes, metavar="SIZE",
        commands="run chat serve batch plan bench embed rank", default_note="what is free",
    )  # fmt: skip
    threads: int | None = _option(
        None, "CPU threads.", allowed=whole(1, MAX_THREADS), flags=("--threads", "-t"),
        commands="run chat serve batch plan eval profile quantize convert doctor embed rank",
        default_note="measured",
    )  # fmt: skip
    repack: bool = _option(
        True, "Copy the weights into the kernels' layout, or keep them memory-mapped (mmap), which takes "
        "almost no memory and decodes at about a third of the speed.", flags=("--repack/--no-repack",),
        commands="run chat serve batch plan eval bench", default_note="repack",
    )  # fmt: skip
    sparse: Sparse = _option(
        "auto", "For ReLU models, on the CPU: read the weights of active neurons only. predicted: predict "
        "which neurons are active. auto: exact if the model's profile predicts a gain.",
        commands="run chat serve batch plan eval bench",
    )  # fmt: skip
    count_activity: bool = _option(
        True, "For large ReLU models: count which neurons prompts activate, for `--sparse auto`. "
        "Only counts are kept, no text.", flags=("--count-activity/--no-count-activity",),
        commands="run chat serve batch", default_note="count",
    )  # fmt: skip
    lora: tuple[LoraChoice, ...] = _option(
        (), "A LoRA adapter (a GGUF file or a PEFT folder) and its scale, 1 if left out. May be repeated.",
        convert=lora_choices, metavar="FILE[:SCALE]",
        commands="run chat serve batch plan bench eval embed rank", persistent=False,
    )  # fmt: skip
    instruction_set: str | None = _option(
        None, "CPU kernels to use, of those that `edgeinfer doctor` lists.", metavar="NAME",
        commands="bench", default_note="the best",
    )  # fmt: skip
    draft: str | Drafter | None = _option(
        "auto", "Speculative decoding with the model's draft head, a draft model of the same vocabulary, "
        "prompt lookup, or half of the model's own layers. It changes the speed, not the output.",
        convert=_draft, metavar="auto|mtp|lookup|self|none|MODEL", commands="run chat serve batch plan",
    )  # fmt: skip
    draft_tree_width: int = _option(
        0, "Draft trees: tokens besides the most probable one that are drafted after each.",
        allowed=whole(0, MAX_TREE_WIDTH), commands="run",
    )  # fmt: skip
    lookup_files: tuple[Path, ...] = _option(
        (), "Speculative decoding: a text that the completion is likely to repeat, such as code to edit; "
        "prompt lookup searches it first. May be repeated.", flags=("--lookup-file",), metavar="FILE",
        convert=_paths, commands="run chat", persistent=False,
    )  # fmt: skip
    kv: CacheType = _option(
        "f16", "Type of the KV cache (quantization): f32, f16, fp8, q8_0, q4_0, or two of them for keys and "
        "values, as q8_0/q4_0. q8_0 takes half the bytes, q4_0 a quarter. +f16: recent positions in f16.",
        allowed=CacheTypes(), metavar="TYPE[/TYPE][+f16]", commands="run chat serve batch plan eval bench",
    )  # fmt: skip
    parallel: int = _option(
        1, "Requests that are answered together, on the CPU: the KV cache holds the whole context of each. "
        "0: 4, or fewer if these don't fit.", allowed=whole(0, MAX_PARALLEL),
        commands="run serve batch plan",
    )  # fmt: skip
    spill: int | None = _option(
        None, "Main memory for the prefixes of idle requests that the KV cache has no place for, as 2GiB. A "
        "request that continues one reads it back.", argument="size", convert=parse_bytes, metavar="SIZE",
        commands="serve batch", default_note="what is free, at most four times the cache",
    )  # fmt: skip
    spill_disk: int | None = _option(
        None, "The same on the disk, for what main memory has no place for. The files are deleted at "
        "the end.",
        argument="size", convert=parse_bytes, metavar="SIZE", commands="serve batch", default_note="0",
    )  # fmt: skip
    chat_template: str | None = _option(
        None,
        "A Jinja file that replaces the model's chat template.",
        argument="file",
        metavar="FILE",
        panel=PROMPT,
    )
    thinking: Thinking | None = _option(
        None, "Reasoning before the response, if the chat template has a variable for it "
        "(enable_thinking, reasoning_effort).", panel=PROMPT, default_note="the template's default",
        common=True,
    )  # fmt: skip
    template_args: Mapping[str, Any] = _option(
        None, "A variable of the chat template; VALUE is JSON, or else text. May be repeated.",
        default_factory=dict, convert=lambda name, given: given or {}, flags=("--template-arg",),
        metavar="NAME=VALUE", panel=PROMPT, persistent=False,
    )  # fmt: skip
    assume_pre_tokenizer: str | None = _option(
        None, "Pre-tokenizer to use if the file's is unknown.", metavar="NAME", panel=PROMPT,
        commands="run chat", persistent=False,
    )  # fmt: skip
    snapshots: bool = option(False, "Restore prompt prefixes that `Model.keep_snapshot` saved to disk.")
    progress: Progress | None = option(None, "Called with bytes loaded.")
    build_progress: Progress | None = option(None, "Called with kernels compiled.")

    @classmethod
    def from_keywords(cls, given: Mapping[str, Any]) -> Self:
        """The options of a caller's keywords. Raises `SettingError`."""
        check_names(given, cls)
        return options_from(cls, given)

    @cached_property
    def template_options(self) -> TemplateOptions:
        """The default template options of all completions."""
        return TemplateOptions(self.thinking, self.template_args)

    @property
    def vram_budgets(self) -> tuple[int | None, ...]:
        """The budget of each GPU in `device`; one budget is that of each.

        Raises `SettingError`: another number of budgets than of GPUs.
        """
        count = len(device_names(self.device))
        if not isinstance(self.vram, tuple):
            return (self.vram,) * count
        if len(self.vram) != count and self.device != "auto":
            raise SettingError(
                f"vram: saw {len(self.vram)} sizes for device {self.device!r}, wanted one for each GPU in it"
            )
        return self.vram

    def drafts_on_gpu(self, *, has_head: bool) -> bool:
        """Whether to draft for a model on a GPU, which may have its draft head: without one only on request,
        because a step of several tokens isn't bit-identical there.
        """
        return has_head or bool(self.lookup_files) or self.draft not in (None, "auto")

    @property
    def asks_sparse(self) -> bool:
        """Whether layers are sparse independent of the profile."""
        return self.sparse in ("exact", "predicted")

    def __post_init__(self) -> None:
        check_options(self)
        self.template_options  # noqa: B018 - checks its values
        if not is_device(self.device):
            raise SettingError(
                f"device: saw {shown(self.device)}, wanted 'auto', 'cpu', 'cuda', 'cuda:N' or 'cuda:0,cuda:1'"
            )
        self.vram_budgets  # noqa: B018 - checks their number
        if self.lookup_files and self.draft is None:
            raise SettingError(
                "lookup_files: used only by drafts; leave them out, or take draft 'auto' or 'lookup'"
            )
        if self.engine == "llama.cpp":
            self._check_llama_cpp()
        if self.engine == "openai":
            self._check_endpoint()
        elif self.base_url is not None:
            raise SettingError("base_url: only the engine 'openai' has a server; add engine='openai'")

    def _check_llama_cpp(self) -> None:
        """Raise `SettingError` for an option that the engine llama.cpp doesn't support."""
        unsupported = {
            "lookup_files": (bool(self.lookup_files), "llama.cpp doesn't draft here"),
            "sparse": (self.asks_sparse, f"llama.cpp doesn't support {self.sparse!r}"),
            "repack": (not self.repack, "llama.cpp decides it"),
            "device": (self.device.startswith("cuda"), "llama.cpp runs on the CPU here"),
            "ram": (self.ram is not None, "llama.cpp has no memory budget"),
            "lora": (bool(self.lora), "adapters aren't passed to llama.cpp here"),
        }
        for name, (is_used, reason) in unsupported.items():
            if is_used:
                raise SettingError(f"{name}: {reason}; leave out {name}, or the engine")

    def _check_endpoint(self) -> None:
        """Raise `SettingError` for an option that isn't for a server."""
        for one in fields(self):
            default = one.default if one.default is not MISSING else {}
            if one.name not in ENDPOINT_OPTIONS and getattr(self, one.name) != default:
                raise SettingError(
                    f"{one.name}: the server of the engine 'openai' decides it; leave out {one.name}, or the "
                    "engine"
                )


class EndpointKeywords(TypedDict, total=False):
    """Keywords of `load` for a model on a server."""

    engine: Required[Literal["openai"]]
    base_url: Required[str]
    key: str | None
    context: int | None
    thinking: Thinking | None
    template_args: Mapping[str, Any] | None


class LoadKeywords(TypedDict, total=False):
    """Keywords of `load`: the fields of `LoadOptions`, with all types that are accepted."""

    context: int | None
    engine: LocalEngine
    device: str
    split: Split
    vram: int | str | Sequence[int | str] | None
    ram: int | str | None
    threads: int | None
    repack: bool
    sparse: Sparse
    count_activity: bool
    lora: GivenLora | Iterable[GivenLora] | None
    instruction_set: str | None
    draft: str | Path | Drafter | None
    draft_tree_width: int
    lookup_files: str | Path | Iterable[str | Path]
    kv: CacheType
    parallel: int
    spill: int | str | None
    spill_disk: int | str | None
    chat_template: str | None
    thinking: Thinking | None
    template_args: Mapping[str, Any] | None
    assume_pre_tokenizer: str | None
    snapshots: bool
    progress: Progress | None
    build_progress: Progress | None
