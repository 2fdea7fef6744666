"""Removal of models from this disk."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.download.partial_file import ENDING, partial_path, version_path
from edgeinfer.errors import EdgeInferError, NotPulledError, UnknownModelError
from edgeinfer.registry.entries import read_registry
from edgeinfer.registry.found_models import ExternalFolders, ollama_models
from edgeinfer.registry.model_file import ModelFile, parts_of
from edgeinfer.registry.registry import default_models_folder, find_model, list_models, split_quant

OWNERS = {
    "Hugging Face cache": "hf cache rm",
    "LM Studio": "LM Studio's list of models",
    "llama.cpp": "rm, in the folder of its cache",
    "Ollama": "ollama rm",
}
"""Source -> how its program removes a model."""


class RemovalError(EdgeInferError):
    """edgeinfer may not remove this model."""


@dataclass(frozen=True)
class Removal:
    """A planned removal. `files`: all parts, including partial downloads."""

    name: str
    files: tuple[Path, ...]
    freed_bytes: int
    """Without bytes that hard links keep."""
    shared_with: tuple[str, ...]
    """Other names of the same file, and models that use it as draft model."""
    hard_links: int
    """Other hard links to the files; their bytes stay on the disk."""


def plan_removal(
    requested: str, *, models_folder: Path | None = None, others: ExternalFolders | None = None
) -> Removal:
    """Plan the removal of a model; no file is changed.

    Raises:
        UnknownModelError: there is no such model here.
        RemovalError: it is built in, a file of the user's own, or another program's; the text says whose.
    """
    folder = models_folder or default_models_folder()
    try:
        model = find_model(requested, models_folder=folder, others=others)
    except NotPulledError:
        files = _partial_files(requested, folder)
        if not files:
            raise UnknownModelError(f"{requested}: not on this disk, so there is nothing to remove") from None
        return Removal(requested, files, _bytes_of(files), (), 0)
    if model.source == "built in":
        raise RemovalError(f"{model.name}: built in; it is removed with edgeinfer itself")
    if model.source in OWNERS:
        raise RemovalError(_external_reason(model, others))
    if not model.path.resolve().is_relative_to(folder.resolve()):
        raise RemovalError(f"{model.path}: a file outside {folder}; remove it yourself")
    parts = parts_of(model.path)
    partials = [
        path
        for part in parts
        for path in (partial_path(part), version_path(partial_path(part)))
        if path.exists()
    ]
    links = sum(part.stat().st_nlink - 1 for part in parts)
    freed = _bytes_of(part for part in parts if part.stat().st_nlink == 1) + _bytes_of(partials)
    return Removal(model.name, (*parts, *partials), freed, _sharing(model, folder, others), links)


def remove(removal: Removal, *, models_folder: Path | None = None) -> None:
    """Remove the files, and folders that become empty.

    Raises:
        OSError: a file can't be removed.
    """
    folder = (models_folder or default_models_folder()).resolve()
    for file in removal.files:
        file.unlink(missing_ok=True)
        parent = file.parent
        while parent.resolve() != folder and parent.exists() and not any(parent.iterdir()):
            parent.rmdir()
            parent = parent.parent


def _external_reason(model: ModelFile, others: ExternalFolders | None) -> str:
    same = [other.name for other in _ollama_names(model, others) if other.name != model.name]
    shared = f"; {', '.join(same)} shares its file" if same else ""
    return f"{model.name}: belongs to {model.source}; remove it with {OWNERS[model.source]}{shared}"


def _ollama_names(model: ModelFile, others: ExternalFolders | None) -> list[ModelFile]:
    folders = (others or ExternalFolders.usual()).ollama
    everything = [listed for folder in folders for listed in ollama_models(folder)]
    return [listed for listed in everything if listed.path.resolve() == model.path.resolve()]


def _sharing(model: ModelFile, folder: Path, others: ExternalFolders | None) -> tuple[str, ...]:
    """Names of other models that use the same file, directly or as draft model."""
    same, path = [], model.path.resolve()
    for other in list_models(models_folder=folder, others=others):
        if other.draft_path and other.draft_path.resolve() == path:
            same.append(f"{other.name} (it drafts for it)")
        elif other.path.resolve() == path and other.path != model.path:
            same.append(other.name)
    return tuple(same)


def _partial_files(requested: str, folder: Path) -> tuple[Path, ...]:
    """Partial files of interrupted pulls of a registry model."""
    entries = read_registry()
    name, quant = split_quant(requested, entries)
    if name is None:
        return ()
    entry = entries[name]
    root = folder / (entry.repository or "")
    files: list[Path] = []
    for path in sorted(root.rglob(f"*{ENDING}")):
        label = entry.quant_of_file(path.relative_to(root).as_posix().removesuffix(ENDING))
        if label is not None and (not quant or label.lower() == quant.lower()):
            files += [file for file in (path, version_path(path)) if file.exists()]
    return tuple(files)


def _bytes_of(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)
