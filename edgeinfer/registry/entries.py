"""The entries of models.toml and of the user's models.toml, validated on reading."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from edgeinfer.chat_templates.template_options import DEFAULTS, TemplateOptions
from edgeinfer.errors import RegistryError, SettingError
from edgeinfer.options.sampling_params import SamplingParams
from edgeinfer.registry.model_file import quant_of
from edgeinfer.registry.toml_files import TomlError, read_toml
from edgeinfer.shapes.known_shapes import SHAPES
from edgeinfer.user_folders import user_folder
from edgeinfer_quant_formats.errors import printable

NAME = re.compile(r"[\w.+-]+(/[\w.+-]+)*", re.ASCII)
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
DIGEST = re.compile(r"[0-9a-f]{64}")
MONTH = re.compile(r"20\d\d-(0[1-9]|1[0-2])", re.ASCII)
KINDS = ("text", "embedding", "scores")
USUAL_QUANT = "Q4_K_M"
"""The quantization that lists and plans assume if none is given."""
TEXTS = (
    "file", "repository", "url", "draft", "parameters", "licence", "notes", "prompt_style", "draft_sha256",
    "head", "head_sha256", "sparsity",
    "shape", "released", "kind",
)  # fmt: skip
OTHERS = (
    "context",
    "quants",
    "size_bytes",
    "sha256",
    "draft_size_bytes",
    "head_size_bytes",
    "thinking",
    "template_args",
    "sampling",
)
KNOWN_KEYS = {*TEXTS, *OTHERS}


@dataclass(frozen=True)
class RegistryEntry:
    """One model of the registry. Missing values are None or empty."""

    name: str
    file: str
    """File name; contains {quant} or {lower_quant} if there are several quantizations."""
    repository: str | None = None
    """Repository on the hub; None: not on the hub."""
    url: str | None = None
    """Alternative download address; {quant} as in `file`."""
    quants: tuple[str, ...] = ()
    """Quantizations; "" for a model with a single file."""
    size_bytes: Mapping[str, int] = field(default_factory=dict)
    sha256: Mapping[str, str] = field(default_factory=dict)
    draft: str | None = None
    """Draft model: a file of the package, or another entry's name."""
    head: str | None = None
    """Draft head: a file of the package."""
    parameters: str = ""
    context: int | None = None
    licence: str = ""
    notes: str = ""
    sparsity: str = ""
    """What its activation sparsity brings; empty: none is known."""
    shape: str = ""
    """Name of its shape, from which it can be planned without a file."""
    released: str = ""
    """Year and month, as 2025-04."""
    kind: Literal["text", "embedding", "scores"] = "text"
    """What it gives: completions, embeddings of texts, or scores of texts for a query."""
    prompt_style: Literal["raw", "chat"] | None = None
    is_own: bool = False
    """Whether the entry is from the user's models.toml."""
    template_options: TemplateOptions = DEFAULTS
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of sampling parameters, by name."""

    def file_of(self, quant: str) -> str:
        """The file name of a quantization."""
        return _filled(self.file, quant)

    def url_of(self, quant: str) -> str | None:
        """The download address of a quantization, if the entry has a `url`."""
        return None if self.url is None else _filled(self.url, quant)

    def quant_named(self, requested: str) -> str | None:
        """A quantization of the entry, ignoring case; None: not listed."""
        return next((quant for quant in self.quants if quant.lower() == requested.lower()), None)

    @property
    def usual_quant(self) -> str:
        """Q4_K_M, also a dynamic one, or the first of the list."""
        usual = (quant for quant in self.quants if quant.removeprefix("UD-") == USUAL_QUANT)
        return next(usual, self.quants[0])

    def quant_of_file(self, path: str) -> str | None:
        """The quantization of a repository file of this model, listed here or not; None: not a file of this
        model. For a model in several parts, any part matches.
        """
        name = PART.sub(".gguf", PurePosixPath(path).name)
        quant = quant_of(path) if self.has_several else self.quants[0]
        return quant if name.lower() == PurePosixPath(self.file_of(quant)).name.lower() else None

    def name_of(self, quant: str) -> str:
        """The name of this quantization for users."""
        return f"{self.name}:{quant}" if self.has_several else self.name

    @property
    def has_several(self) -> bool:
        """Whether the model may have more than one quantization."""
        return "quant}" in self.file


def _filled(pattern: str, quant: str) -> str:
    return pattern.replace("{quant}", quant).replace("{lower_quant}", quant.lower())


def read_registry(own: Path | None = None) -> dict[str, RegistryEntry]:
    """Name -> entry: the package's entries, overridden by those of the file `own` (None: models.toml in the
    configuration folder, if it exists).

    Raises:
        RegistryError: an invalid entry; the text gives its name and the reason.
        OSError: the user's file can't be opened.
    """
    entries = dict(_packaged_entries())
    own = own or user_registry()
    if not own.exists():
        return entries
    return entries | {name: replace(entry, is_own=True) for name, entry in _entries(own).items()}


@cache
def _packaged_entries() -> Mapping[str, RegistryEntry]:
    """The package's entries, read once: each load and each request of a server looks a model up."""
    packaged = Path(__file__).parents[1] / "models.toml"
    checkout = Path(__file__).parents[2] / "models.toml"
    return _entries(packaged if packaged.exists() else checkout)


def user_registry() -> Path:
    """Path of the user's models.toml."""
    return user_folder("config") / "models.toml"


def _entries(path: Path) -> dict[str, RegistryEntry]:
    try:
        tables = read_toml(path)
    except TomlError as error:
        raise RegistryError(str(error)) from error
    entries = {}
    for name, table in tables.items():
        try:
            entries[name] = _entry(name, table)
        except RegistryError as error:
            raise RegistryError(f"{path}: [{printable(name)}]: {error}") from None
    return entries


def _entry(name: str, table: Any) -> RegistryEntry:
    if not NAME.fullmatch(name):
        raise RegistryError("wanted a name of letters, digits and . _ + - /")
    if not isinstance(table, dict):
        raise RegistryError(f"saw {printable(repr(table))}, wanted a table with a file")
    if unknown := table.keys() - KNOWN_KEYS:
        raise RegistryError(
            f"{printable(min(unknown))}: no such key; there are {', '.join(sorted(KNOWN_KEYS))}"
        )
    for key in TEXTS:
        if key in table and not isinstance(table[key], str):
            raise RegistryError(f"{key}: saw {printable(repr(table[key]))}, wanted a text")
    if not table.get("file"):
        raise RegistryError("file is missing")
    if "repository" in table and not REPOSITORY.fullmatch(table["repository"]):
        raise RegistryError(f"repository: saw {printable(repr(table['repository']))}, wanted owner/name")
    if "shape" in table and table["shape"] not in SHAPES:
        raise RegistryError(
            f"shape: saw {printable(repr(table['shape']))}, wanted one of {', '.join(SHAPES)}"
        )
    if "released" in table and not MONTH.fullmatch(table["released"]):
        raise RegistryError(f"released: saw {printable(repr(table['released']))}, wanted a month as 2025-04")
    if table.get("kind") not in (None, *KINDS):
        raise RegistryError(f"kind: saw {printable(repr(table['kind']))}, wanted {' or '.join(KINDS)}")
    if table.get("prompt_style") not in (None, "raw", "chat"):
        raise RegistryError(f"prompt_style: saw {printable(repr(table['prompt_style']))}, wanted raw or chat")
    quants = _quants(table)
    return RegistryEntry(
        name=name,
        quants=quants,
        size_bytes=_by_quant(table, "size_bytes", quants, _is_count, "a number of bytes"),
        sha256=_by_quant(table, "sha256", quants, _is_digest, "64 hexadecimal digits"),
        context=_context(table),
        template_options=_template_options(table),
        sampling=_sampling(table),
        **{key: table[key] for key in TEXTS if key in table and not key.endswith("_sha256")},
    )


def _template_options(table: Mapping[str, Any]) -> TemplateOptions:
    try:
        return TemplateOptions(table.get("thinking"), table.get("template_args", {}))
    except SettingError as error:
        raise RegistryError(str(error)) from None


def _sampling(table: Mapping[str, Any]) -> Mapping[str, Any]:
    value = table.get("sampling", {})
    if not isinstance(value, dict):
        raise RegistryError(f"sampling: saw {printable(repr(value))}, wanted a table of sampling parameters")
    try:
        SamplingParams.from_keywords(value)
    except SettingError as error:
        raise RegistryError(f"sampling: {error}") from None
    return value


def _quants(table: Mapping[str, Any]) -> tuple[str, ...]:
    several = "quant}" in table["file"]
    quants = table.get("quants", [] if several else [""])
    if not isinstance(quants, list) or not all(isinstance(quant, str) for quant in quants) or not quants:
        raise RegistryError(f'quants: saw {printable(repr(quants))}, wanted a list as ["Q8_0", "Q4_K_M"]')
    return tuple(quants)


def _by_quant(
    table: Mapping[str, Any], key: str, quants: tuple[str, ...], is_right: Any, expected: str
) -> dict[str, Any]:
    """A value per quantization, or of the model's only file."""
    given = table.get(key, {})
    values = given if isinstance(given, dict) else {quants[0]: given}
    for quant, value in values.items():
        if quant not in quants:
            raise RegistryError(f"{key}.{printable(quant)}: not among the quants {', '.join(quants)}")
        if not is_right(value):
            raise RegistryError(f"{key}: saw {printable(repr(value))}, wanted {expected}")
    return values


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and DIGEST.fullmatch(value) is not None


def _context(table: Mapping[str, Any]) -> int | None:
    value = table.get("context")
    if value is not None and not _is_count(value):
        raise RegistryError(f"context: saw {printable(repr(value))}, wanted a number of tokens")
    return value
