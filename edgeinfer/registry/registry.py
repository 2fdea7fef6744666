"""Resolves what a user types to a model's files: registry name, path, or nothing for the built-in model."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from edgeinfer.errors import NotPulledError, UnknownModelError
from edgeinfer.hugging_face.opening import is_model_folder
from edgeinfer.registry.entries import RegistryEntry, read_registry, user_registry
from edgeinfer.registry.found_models import ExternalFolders, found_file, found_models
from edgeinfer.registry.model_file import ModelFile, Source, models_under
from edgeinfer.registry.near_names import nearest
from edgeinfer.user_folders import user_folder

__all__ = ["ModelFile", "default_models_folder", "find_draft", "find_model", "list_models", "read_registry"]

SEPARATORS = tuple(filter(None, (os.sep, os.altsep)))
"""Of paths: Windows has two."""
BUILTIN_NAME = "tiny"
MAX_LISTED = 8


def find_model(
    name_or_path: str | Path | None = None,
    *,
    models_folder: Path | None = None,
    others: ExternalFolders | None = None,
) -> ModelFile:
    """Find a model.

    A registry name, as `qwen3-8b`, or with a quantization, `qwen3-8b:Q4_K_M` (without one: the most recent of
    those on this disk); a path to a .gguf file (`~` is the home folder) or to a folder with one; the name of
    a file in the models folder, with or without `.gguf`, or of a model that another program stored on this
    disk; None or an empty text: the built-in model.

    Raises:
        UnknownModelError: nothing of that name, or a folder that holds no model or several.
        NotPulledError: in the model registry, and not on this disk yet.
        RegistryError: an entry of the user's own that can't be read.
    """
    requested = str(name_or_path or BUILTIN_NAME)
    folder = models_folder or default_models_folder()
    others = others or ExternalFolders.usual()
    entries = read_registry()
    name, quant = split_quant(requested, entries)
    if name is not None:
        return _from_registry(entries[name], quant, entries, folder, others)
    # os.path returns False for a text that is no valid path; pathlib raises.
    path = Path(os.path.expanduser(requested))
    if os.path.isdir(path) and is_model_folder(path):
        return ModelFile(name=path.resolve().name, path=path, source="path")
    if os.path.isdir(path):
        return _from_path(_only_model_in(path))
    if os.path.exists(path):
        return _from_path(path)
    for model in [*_in_folder(folder, drafts=True), *found_models(others)]:
        if requested in (model.name, model.path.name):
            return model
    raise _unknown(requested, path, entries, folder)


def find_draft(name_or_path: str | Path) -> ModelFile:
    """As `find_model`, for a draft model; its errors name the draft."""
    try:
        return find_model(name_or_path)
    except NotPulledError as error:
        raise NotPulledError(f"draft: {error}", error.name) from error
    except UnknownModelError as error:
        raise UnknownModelError(f"draft: {error}") from error


def list_models(
    *, models_folder: Path | None = None, others: ExternalFolders | None = None
) -> list[ModelFile]:
    """All available models: registry models on this disk, the models folder by name, then models of other
    programs. A model with several quantizations is listed once for each, as `name:Q4_K_M`.
    """
    folder, others = models_folder or default_models_folder(), others or ExternalFolders.usual()
    entries = read_registry()
    known = [
        _described(entry, quant, model, entries, folder, others)
        for entry in entries.values()
        for quant, model in _located(entry, folder, others)
    ]
    taken = {path.resolve() for model in known for path in (model.path, model.draft_path) if path}
    remaining = [*_in_folder(folder), *found_models(others)]
    return known + [model for model in remaining if model.path.resolve() not in taken]


def default_models_folder() -> Path:
    """The folder for downloaded models and the user's own."""
    return user_folder("data") / "models"


def split_quant(requested: str, entries: Mapping[str, RegistryEntry]) -> tuple[str | None, str]:
    """Registry name and quantization ("": none is given) of `NAME[:QUANT]`; None: unknown name."""
    if requested in entries:
        return requested, ""
    name, colon, quant = requested.rpartition(":")
    return (name, quant) if colon and name in entries else (None, "")


def path_of(entry: RegistryEntry, file: str, folder: Path) -> Path:
    """Path of an entry's file in the models folder; it need not exist."""
    return folder / (entry.repository or "") / file


def _from_registry(
    entry: RegistryEntry,
    quant: str,
    entries: Mapping[str, RegistryEntry],
    folder: Path,
    others: ExternalFolders,
) -> ModelFile:
    here = list(_located(entry, folder, others))
    if quant:
        here = [(label, model) for label, model in here if label.lower() == quant.lower()]
    if not here:
        raise _not_pulled(entry, quant, folder)
    label, model = max(here, key=lambda pair: pair[1].path.stat().st_mtime)
    model_file = _described(entry, label, model, entries, folder, others)
    return model_file if quant else replace(model_file, name=entry.name)


def _not_pulled(entry: RegistryEntry, quant: str, folder: Path) -> NotPulledError | UnknownModelError:
    name = f"{entry.name}:{quant}" if quant else entry.name
    if entry.repository is None and entry.url is None:
        if quant and entry.quant_named(quant) is None:
            there = " or ".join(map(entry.name_of, entry.quants))
            return UnknownModelError(f"{name}: no such quantization; there is {there}")
        if entry.is_own:
            file = path_of(entry, os.path.expanduser(entry.file_of(quant or entry.quants[0])), folder)
            return UnknownModelError(
                f"{name}: {file}: no such file; put it there, or change the entry in {user_registry()}"
            )
        return UnknownModelError(f"{name}: {entry.file} is not in {folder}, and it can't be fetched")
    return NotPulledError(f"{name}: not on this disk yet; fetch it with: edgeinfer pull {name}", name)


def _located(entry: RegistryEntry, folder: Path, others: ExternalFolders) -> Iterator[tuple[str, ModelFile]]:
    """The quantizations of an entry that are on this disk."""
    root = folder / (entry.repository or "")
    if entry.repository is None:
        candidates: tuple[tuple[Source, Path], ...] = (
            ("built in", _builtin_folder()),
            ("models folder", root),
        )
        if entry.is_own:
            candidates = (("models.toml", root),)
        for quant in entry.quants:
            file = os.path.expanduser(entry.file_of(quant))
            here = [
                (source, directory / file) for source, directory in candidates if (directory / file).exists()
            ]
            if here:
                source, path = here[0]
                yield quant, ModelFile(entry.name, path, source)
        return
    ours = {}
    for path in models_under(root):
        label = entry.quant_of_file(path.relative_to(root).as_posix())
        if label is not None:
            ours[label] = ModelFile(entry.name, path, "models folder")
    for quant in [*entry.quants, *(label for label in ours if label not in entry.quants)]:
        located = ours.get(quant) or found_file(entry.repository, entry.file_of(quant), others)
        if located:
            yield quant, located


def _described(
    entry: RegistryEntry,
    quant: str,
    model: ModelFile,
    entries: Mapping[str, RegistryEntry],
    folder: Path,
    others: ExternalFolders,
) -> ModelFile:
    """A model file with its registry data."""
    return replace(
        model,
        name=entry.name_of(quant),
        draft_path=_draft_of(entry, entries, folder, others),
        head_path=_package_file(entry.head),
        parameters=entry.parameters,
        context=entry.context,
        licence=entry.licence,
        notes=entry.notes,
        prompt_style=entry.prompt_style,
        template_options=entry.template_options,
        sampling=entry.sampling,
    )


def _draft_of(
    entry: RegistryEntry, entries: Mapping[str, RegistryEntry], folder: Path, others: ExternalFolders
) -> Path | None:
    """The file of an entry's draft model, if it is on this disk: another entry's model, or a file."""
    if entry.draft is None:
        return None
    if entry.draft in entries:
        here = [model.path for _, model in _located(entries[entry.draft], folder, others)]
        return max(here, key=lambda path: path.stat().st_mtime, default=None)
    candidates = (_builtin_folder() / entry.draft, path_of(entry, entry.draft, folder))
    return next((path for path in candidates if path.exists()), None)


def _package_file(name: str | None) -> Path | None:
    """A file of the package by its name, if there is one."""
    path = None if name is None else _builtin_folder() / name
    return path if path is not None and path.exists() else None


def _builtin_folder() -> Path:
    return Path(__file__).parents[1] / "builtin"


def _from_path(path: Path) -> ModelFile:
    # Files of the package have registry entries, whatever path they are given by.
    if path.resolve().parent == _builtin_folder().resolve():
        entries = read_registry()
        for entry in entries.values():
            if path.name == entry.file:
                return _from_registry(entry, "", entries, path.parent, ExternalFolders.usual())
    return ModelFile(name=path.stem, path=path, source="path")


def _in_folder(folder: Path, *, drafts: bool = False) -> list[ModelFile]:
    found = models_under(folder, drafts=drafts)
    return [ModelFile(path.stem, path, "models folder") for path in found]


def _only_model_in(folder: Path) -> Path:
    models = models_under(folder, "*.gguf")
    if len(models) == 1:
        return models[0]
    if not models:
        raise UnknownModelError(
            f"{folder}: a folder without a .gguf file, or config.json and safetensors; name a model"
        )
    names = first_few([path.name for path in models])
    raise UnknownModelError(f"{folder}: a folder with {len(models)} models; name one of {names}")


def first_few(names: Sequence[str]) -> str:
    """Names for a message, limited in length."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def _unknown(
    requested: str, path: Path, entries: Mapping[str, RegistryEntry], folder: Path
) -> UnknownModelError:
    """The error for an unknown name, with the nearest known names."""
    if requested.startswith(("hf:", "http://", "https://")):
        short = _shortened(requested)
        return UnknownModelError(
            f"{short}: wanted a model that is here; fetch this one with: edgeinfer pull {short}"
        )
    is_path = path.suffix == ".gguf" or len(path.parts) > 1 or any(mark in requested for mark in SEPARATORS)
    if is_path and os.path.isdir(path.parent):
        files = models_under(path.parent, "*.gguf", drafts=True)
        others = {str(other.relative_to(path.parent)) for other in files}
        near = nearest(path.name.removesuffix(".gguf"), sorted(others))
        hint = (
            f"did you mean {' or '.join(os.path.join(os.path.dirname(requested), name) for name in near)}?"
            if near
            else f"{path.parent.absolute()} has no .gguf file like it"
        )
        return UnknownModelError(f"{_shortened(requested)}: no such file; {hint}")
    if is_path:
        return UnknownModelError(f"{_shortened(requested)}: no such file, nor is there such a folder")
    names = list(dict.fromkeys([BUILTIN_NAME, *(model.name for model in _in_folder(folder)), *entries]))
    near = nearest(requested.partition(":")[0], names)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {first_few(names)}."
    remedy = "Name one of `edgeinfer list --all` or the path of a .gguf file"
    return UnknownModelError(f"{_shortened(requested)}: no such model; {hint} {remedy}")


def _shortened(requested: str) -> str:
    """The typed name on one line, shortened."""
    line = " ".join(requested.split()) or repr(requested[:57])
    return line if len(line) <= 60 else line[:57] + "..."
