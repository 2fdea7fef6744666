"""From what a user types to a model's files: catalogue name, path, or nothing for the built-in model."""

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edgeinfer.errors import UnknownModelError
from edgeinfer.user_folders import user_folder

BUILTIN_NAME = "tiny"
LATER_PART = re.compile(r"-(?!00001-of-)\d{5}-of-\d{5}\.gguf$")
MOST_LISTED = 8

Source = Literal["built in", "models folder", "path"]


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

    @property
    def size_bytes(self) -> int:
        """Bytes of the file, all parts of a split model together."""
        return sum(part.stat().st_size for part in _parts(self.path))


def find_model(name_or_path: str | Path | None = None, *, models_folder: Path | None = None) -> ModelFile:
    """The model that a user means.

    A catalogue name; a path to a .gguf file (`~` is the home folder) or to a folder that holds one; the
    name of a file in the models folder, with or without `.gguf`; None or nothing: the built-in model.

    Raises:
        UnknownModelError: nothing of that name, or a folder that holds no model or several.
    """
    wanted = str(name_or_path or BUILTIN_NAME)
    folder = models_folder or default_models_folder()
    entries = read_catalogue()
    if wanted in entries:
        return _from_catalogue(wanted, entries[wanted], folder)
    # os.path answers "no" to a text that can't be a path at all, where pathlib raises.
    path = Path(os.path.expanduser(wanted))
    if os.path.isdir(path):
        return _from_path(_only_model_in(path))
    if os.path.exists(path):
        return _from_path(path)
    for model in _in_folder(folder):
        if wanted in (model.name, model.path.name):
            return model
    raise _unknown(wanted, path, entries, folder)


def list_models(*, models_folder: Path | None = None) -> list[ModelFile]:
    """Every model at hand: those of the catalogue that are on this disk, then the models folder by name."""
    folder = models_folder or default_models_folder()
    known = [
        _from_catalogue(name, entry, folder)
        for name, entry in read_catalogue().items()
        if _locate(entry["file"], folder)
    ]
    taken = {path for model in known for path in (model.path, model.draft_path)}
    return known + [model for model in _in_folder(folder) if model.path not in taken]


def default_models_folder() -> Path:
    """Where downloaded models lie, and where a user may put his own."""
    return user_folder("data") / "models"


def read_catalogue() -> dict[str, dict[str, Any]]:
    """`models.toml`, name -> entry: from the package, or from the repository in a source checkout."""
    packaged = Path(__file__).with_name("models.toml")
    checkout = Path(__file__).parents[1] / "models.toml"
    return tomllib.loads((packaged if packaged.exists() else checkout).read_text(encoding="utf-8"))


def _from_catalogue(name: str, entry: Mapping[str, Any], folder: Path) -> ModelFile:
    path = _locate(entry["file"], folder)
    if path is None:
        raise UnknownModelError(f"{name}: in the catalogue, but {entry['file']} is not in {folder}")
    return ModelFile(
        name=name,
        path=path,
        source="built in" if path.parent == _builtin_folder() else "models folder",
        draft_path=_locate(entry["draft"], folder) if "draft" in entry else None,
        parameters=entry.get("parameters", ""),
        context=entry.get("context"),
        licence=entry.get("licence", ""),
        notes=entry.get("notes", ""),
        prompt_style=entry.get("prompt_style"),
    )


def _locate(file: str, folder: Path) -> Path | None:
    return next((path for path in (_builtin_folder() / file, folder / file) if path.exists()), None)


def _builtin_folder() -> Path:
    return Path(__file__).with_name("builtin")


def _from_path(path: Path) -> ModelFile:
    # The catalogue knows its own files by whatever path they are named.
    for name, entry in read_catalogue().items():
        if path.name == entry["file"] and path.resolve().parent == _builtin_folder().resolve():
            return _from_catalogue(name, entry, path.parent)
    return ModelFile(name=path.stem, path=path, source="path")


def _in_folder(folder: Path) -> list[ModelFile]:
    return [ModelFile(path.stem, path, "models folder") for path in _models_under(folder, "**/*.gguf")]


def _models_under(folder: Path, pattern: str) -> list[Path]:
    """GGUF files, one for each model: of a split one, the first part."""
    return sorted(path for path in folder.glob(pattern) if not LATER_PART.search(path.name))


def _only_model_in(folder: Path) -> Path:
    found = _models_under(folder, "*.gguf")
    if len(found) == 1:
        return found[0]
    if not found:
        raise UnknownModelError(f"{folder}: a folder without a .gguf file; name a model file")
    names = ", ".join(path.name for path in found[:MOST_LISTED])
    more = f" and {len(found) - MOST_LISTED} more" if len(found) > MOST_LISTED else ""
    raise UnknownModelError(f"{folder}: a folder with {len(found)} models; name one of {names}{more}")


def _unknown(wanted: str, path: Path, entries: Mapping[str, Any], folder: Path) -> UnknownModelError:
    """The error for a name that leads nowhere, with the nearest that lead somewhere."""
    is_path = path.suffix == ".gguf" or len(path.parts) > 1 or os.sep in wanted
    if is_path and os.path.isdir(path.parent):
        beside = {str(other.relative_to(path.parent)) for other in _models_under(path.parent, "*.gguf")}
        near = difflib.get_close_matches(path.name, beside, n=3)
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else f"{path.parent.absolute()} has no .gguf file like it"
        )
        return UnknownModelError(f"{_shortened(wanted)}: no such file; {hint}")
    if is_path:
        return UnknownModelError(f"{_shortened(wanted)}: no such file, nor is there such a folder")
    names = [*entries, *(model.name for model in _in_folder(folder))]
    near = difflib.get_close_matches(wanted, names, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names[:MOST_LISTED])}."
    way_out = "Name one of `edgeinfer list` or the path of a .gguf file"
    return UnknownModelError(f"{_shortened(wanted)}: no such model; {hint} {way_out}")


def _shortened(wanted: str) -> str:
    """One line of what was typed, however long it was."""
    line = " ".join(wanted.split())
    return line if len(line) <= 60 else line[:57] + "..."


def _parts(path: Path) -> list[Path]:
    """All files of a model whose first part is `path`."""
    first = re.search(r"-00001-of-(\d{5})\.gguf$", path.name)
    if first is None:
        return [path]
    return sorted(path.parent.glob(f"{path.name[: first.start()]}-*-of-{first[1]}.gguf"))
