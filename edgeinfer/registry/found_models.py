"""GGUF files that other programs stored on this disk; they are used in place."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.registry.model_file import ModelFile, Source, models_under

MODEL_LAYER = "application/vnd.ollama.image.model"


@dataclass(frozen=True)
class ExternalFolders:
    """Model folders of other programs on this machine."""

    hugging_face: Path
    lm_studio: tuple[Path, ...]
    llama_cpp: Path
    ollama: tuple[Path, ...]

    @classmethod
    def usual(
        cls,
        *,
        platform: str = sys.platform,
        environment: Mapping[str, str] = os.environ,
        home: Path | None = None,
    ) -> "ExternalFolders":
        """The folders that those programs use: from their environment variables, else the defaults."""
        home = home or Path.home()

        def given(variable: str, otherwise: Path) -> Path:
            return Path(environment[variable]) if environment.get(variable) else otherwise

        caches = given("XDG_CACHE_HOME", home / ".cache")
        llama = caches
        if platform == "darwin":
            llama = home / "Library" / "Caches"
        elif platform == "win32":
            llama = given("LOCALAPPDATA", home / "AppData" / "Local")
        hub_home = given("HF_HOME", caches / "huggingface")
        return cls(
            hugging_face=given("HF_HUB_CACHE", hub_home / "hub"),
            lm_studio=(home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"),
            llama_cpp=given("LLAMA_CACHE", llama / "llama.cpp"),
            ollama=(
                given("OLLAMA_MODELS", home / ".ollama" / "models"),
                Path("/usr/share/ollama/.ollama/models"),
            ),
        )


def found_models(folders: ExternalFolders | None = None) -> list[ModelFile]:
    """Every model of other programs, each file once; unreadable folders are skipped."""
    folders = folders or ExternalFolders.usual()
    models: dict[Path, ModelFile] = {}
    for model in _all(folders):
        models.setdefault(model.path.resolve(), model)
    return list(models.values())


def found_file(repository: str, file: str, folders: ExternalFolders | None = None) -> ModelFile | None:
    """A file of the hub in folders whose layout records the repository, or None."""
    folders = folders or ExternalFolders.usual()
    snapshots = folders.hugging_face / f"models--{repository.replace('/', '--')}" / "snapshots"
    candidates: list[tuple[Source, Path]] = [
        ("Hugging Face cache", revision / file) for revision in _entries(snapshots)
    ]
    candidates += [("LM Studio", folder / repository / file) for folder in folders.lm_studio]
    for source, path in candidates:
        if path.is_file():
            return ModelFile(path.stem, path, source)
    return None


def _all(folders: ExternalFolders) -> Iterator[ModelFile]:
    for repository in _entries(folders.hugging_face):
        if repository.name.startswith("models--"):
            yield from _in("Hugging Face cache", repository / "snapshots")
    for folder in folders.lm_studio:
        yield from _in("LM Studio", folder)
    yield from _in("llama.cpp", folders.llama_cpp)
    for folder in folders.ollama:
        yield from ollama_models(folder)


def _in(source: Source, folder: Path) -> list[ModelFile]:
    try:
        return [ModelFile(path.stem, path, source) for path in models_under(folder)]
    except OSError:
        return []


def ollama_models(folder: Path) -> list[ModelFile]:
    """The models of an Ollama folder, as "ollama/llama3.2:3b"; several may share one file.

    Source: a manifest is manifests/HOST/OWNER/MODEL/TAG, JSON with layers; the digest of the model layer is
    the name of its file, blobs/sha256-....
    """
    models = []
    root = folder / "manifests"
    try:
        manifests = sorted(path for path in root.glob("*/*/*/*") if path.is_file())
    except OSError:
        return []
    for manifest in manifests:
        digest = _model_digest(manifest)
        if digest is None:
            continue
        blob = folder / "blobs" / digest.replace(":", "-")
        if _is_gguf(blob):
            host, owner, model, tag = manifest.relative_to(root).parts
            shown = [part for part in (host, owner) if part not in ("registry.ollama.ai", "library")]
            name = "/".join(["ollama", *shown, f"{model}:{tag}"])
            models.append(ModelFile(name, blob, "Ollama"))
    return models


def _model_digest(manifest: Path) -> str | None:
    try:
        layers = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
        return next((str(layer["digest"]) for layer in layers if layer["mediaType"] == MODEL_LAYER), None)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None  # an incomplete manifest, or not one of a model


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
