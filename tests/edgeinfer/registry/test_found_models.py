"""Models of other programs, used in place."""

import json
from pathlib import Path

import pytest

from edgeinfer.registry.found_models import ExternalFolders, found_models
from edgeinfer.registry.registry import find_model, list_models

HUB = "models--bartowski--Llama-3.2-1B-Instruct-GGUF/snapshots/0123abc"
FILE = "Llama-3.2-1B-Instruct-Q4_K_M.gguf"


@pytest.fixture
def others(tmp_path: Path) -> ExternalFolders:
    folders = ExternalFolders.usual(platform="linux", environment={}, home=tmp_path)
    return ExternalFolders(folders.hugging_face, folders.lm_studio, folders.llama_cpp, folders.ollama[:1])


def put(path: Path, content: bytes = b"GGUF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def put_in_ollama(folder: Path, name: str, blob: bytes = b"GGUF", digest: str = "sha256:ab") -> None:
    put(folder / "blobs" / digest.replace(":", "-"), blob)
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:cd"},
        {"mediaType": "application/vnd.ollama.image.model", "digest": digest},
    ]
    put(folder / "manifests" / name, json.dumps({"layers": layers}).encode())


def test_each_program_has_its_model_folder() -> None:
    home = Path("/home/eva")
    original = ExternalFolders.usual(platform="linux", environment={}, home=home)
    assert original.hugging_face == home / ".cache/huggingface/hub"
    assert original.llama_cpp == home / ".cache/llama.cpp"
    assert original.lm_studio[0] == home / ".lmstudio/models"
    assert original.ollama[0] == home / ".ollama/models"
    mac = ExternalFolders.usual(platform="darwin", environment={}, home=home)
    assert mac.llama_cpp == home / "Library/Caches/llama.cpp"
    given = {"HF_HOME": "/a", "LLAMA_CACHE": "/b", "OLLAMA_MODELS": "/c"}
    theirs = ExternalFolders.usual(platform="linux", environment=given, home=home)
    assert (theirs.hugging_face, theirs.llama_cpp, theirs.ollama[0]) == (
        Path("/a/hub"),
        Path("/b"),
        Path("/c"),
    )
    assert ExternalFolders.usual(environment={"HF_HUB_CACHE": "/d"}, home=home).hugging_face == Path("/d")


def test_models_of_all_programs_are_found_and_a_shared_file_once(
    others: ExternalFolders, tmp_path: Path
) -> None:
    in_hub = put(others.hugging_face / HUB / FILE)
    put(others.hugging_face / HUB / "mmproj-F16.gguf")
    put(others.hugging_face / "version.txt")
    put(others.lm_studio[0] / "me" / "mine-GGUF" / "mine.gguf")
    put(others.llama_cpp / "owner_repo_big-00001-of-00002.gguf")
    put(others.llama_cpp / "owner_repo_big-00002-of-00002.gguf")
    second = others.hugging_face / "models--x--y/snapshots/1/again.gguf"
    second.parent.mkdir(parents=True)
    second.symlink_to(in_hub)
    result = [(model.name, model.source) for model in found_models(others)]
    assert result == [
        ("Llama-3.2-1B-Instruct-Q4_K_M", "Hugging Face cache"),
        ("mine", "LM Studio"),
        ("owner_repo_big-00001-of-00002", "llama.cpp"),
    ]


def test_a_model_of_ollama_has_its_ollama_name(others: ExternalFolders, tmp_path: Path) -> None:
    put_in_ollama(others.ollama[0], "registry.ollama.ai/library/llama3.2/3b")
    put_in_ollama(others.ollama[0], "hf.co/me/mine/latest", digest="sha256:ef")
    put_in_ollama(others.ollama[0], "registry.ollama.ai/library/clip/1", b"PK12", "sha256:00")
    put(others.ollama[0] / "manifests/registry.ollama.ai/library/broken/1", b"{")
    put(others.ollama[0] / "manifests/registry.ollama.ai/library/odd/1", b"[]")
    assert {model.name for model in found_models(others)} == {
        "ollama/llama3.2:3b",
        "ollama/hf.co/me/mine:latest",
    }
    result = find_model("ollama/llama3.2:3b", models_folder=tmp_path / "models", others=others)
    assert (result.source, result.path.name) == ("Ollama", "sha256-ab")


def test_a_registry_model_in_the_hub_cache_needs_no_pull(others: ExternalFolders, tmp_path: Path) -> None:
    path = put(others.hugging_face / HUB / FILE)
    result = find_model("llama-3.2-1b", models_folder=tmp_path / "models", others=others)
    assert (result.path, result.source, result.parameters) == (path, "Hugging Face cache", "1.2B")
    listed = list_models(models_folder=tmp_path / "models", others=others)
    assert [model.name for model in listed] == ["tiny", "llama-3.2-1b:Q4_K_M"]


def test_a_registry_model_of_lm_studio_needs_no_pull(others: ExternalFolders, tmp_path: Path) -> None:
    put(others.lm_studio[1] / "bartowski/Llama-3.2-1B-Instruct-GGUF" / FILE)
    assert find_model("llama-3.2-1b", models_folder=tmp_path / "models", others=others).source == "LM Studio"


def test_a_model_of_another_program_is_found_by_file_name(others: ExternalFolders, tmp_path: Path) -> None:
    put(others.llama_cpp / "mine.gguf")
    assert find_model("mine.gguf", models_folder=tmp_path / "models", others=others).source == "llama.cpp"


def test_missing_folders_have_no_models(others: ExternalFolders) -> None:
    assert found_models(others) == []
