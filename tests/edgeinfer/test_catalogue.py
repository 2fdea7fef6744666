"""From a name to a model's files."""

import hashlib
from pathlib import Path

import pytest

from edgeinfer.catalogue import find_model, list_models, read_catalogue
from edgeinfer.errors import UnknownModelError


def make_models(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"GGUF")
    return folder


def message_for(wanted: str | Path, folder: Path) -> str:
    with pytest.raises(UnknownModelError) as caught:
        find_model(wanted, models_folder=folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("nothing", [None, "", "tiny"])
def test_nothing_is_the_built_in_model_with_its_draft(nothing: str | None) -> None:
    model = find_model(nothing)
    assert (model.name, model.source, model.parameters, model.context) == ("tiny", "built in", "30M", 1024)
    assert model.path.name == "edgeinfer-tiny-30m-Q4_K_M.gguf"
    assert model.draft_path is not None
    assert model.draft_path.name == "edgeinfer-tiny-draft-5m-Q8_0.gguf"
    assert model.prompt_style == "raw"


def test_the_shipped_files_are_those_that_the_catalogue_describes() -> None:
    entry = read_catalogue()["tiny"]
    model = find_model("tiny")
    assert model.draft_path is not None
    for path, prefix in [(model.path, ""), (model.draft_path, "draft_")]:
        assert path.stat().st_size == entry[f"{prefix}size_bytes"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == entry[f"{prefix}sha256"]


def test_the_built_in_file_is_known_by_its_path_too() -> None:
    assert find_model(find_model("tiny").path).name == "tiny"


def test_a_path_needs_no_catalogue(tmp_path: Path) -> None:
    model = find_model(make_models(tmp_path, "own.gguf") / "own.gguf")
    assert (model.name, model.source, model.draft_path, model.prompt_style) == ("own", "path", None, None)
    assert model.size_bytes == 4


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(make_models(tmp_path, "own.gguf")))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert find_model("~/own.gguf").path == tmp_path / "own.gguf"


def test_a_folder_with_one_model_is_that_model(tmp_path: Path) -> None:
    assert find_model(make_models(tmp_path, "own.gguf", "notes.txt")).name == "own"


def test_a_split_model_counts_as_one(tmp_path: Path) -> None:
    make_models(tmp_path, "big-00001-of-00002.gguf", "big-00002-of-00002.gguf")
    model = find_model(tmp_path)
    assert model.path.name == "big-00001-of-00002.gguf"
    assert model.size_bytes == 8
    assert [listed.name for listed in list_models(models_folder=tmp_path)] == ["tiny", "big-00001-of-00002"]


def test_a_folder_with_several_models_lists_them(tmp_path: Path) -> None:
    make_models(tmp_path, *(f"m{number:02}.gguf" for number in range(10)))
    said = message_for(tmp_path, tmp_path)
    assert "a folder with 10 models; name one of m00.gguf, m01.gguf" in said
    assert said.endswith("m07.gguf and 2 more")


def test_a_folder_without_models_says_so(tmp_path: Path) -> None:
    assert message_for(tmp_path, tmp_path).endswith("a folder without a .gguf file; name a model file")


def test_the_models_folder_is_searched_by_name(tmp_path: Path) -> None:
    make_models(tmp_path, "deep/own.gguf")
    assert find_model("own", models_folder=tmp_path).source == "models folder"
    assert find_model("own.gguf", models_folder=tmp_path).path == tmp_path / "deep" / "own.gguf"


def test_a_misspelt_name_is_answered_with_the_nearest(tmp_path: Path) -> None:
    make_models(tmp_path, "granite-2b.gguf")
    assert message_for("tinny", tmp_path).startswith("tinny: no such model; did you mean tiny? Name one of")
    assert "did you mean granite-2b?" in message_for("granit-2b", tmp_path)
    assert "known: tiny, granite-2b. Name one of `edgeinfer list`" in message_for("zzz", tmp_path)


def test_a_misspelt_path_is_answered_with_what_lies_beside_it(tmp_path: Path) -> None:
    make_models(tmp_path, "granite.gguf")
    assert message_for(tmp_path / "granit.gguf", tmp_path).endswith(
        "no such file; did you mean granite.gguf?"
    )
    assert "has no .gguf file like it" in message_for(tmp_path / "zzz.gguf", tmp_path)
    assert (
        message_for("no/such/x.gguf", tmp_path) == "no/such/x.gguf: no such file, nor is there such a folder"
    )


@pytest.mark.parametrize("text", ["x" * 5000, "a\0b", "line\nline", "~nobody-at-all/x"])
def test_a_text_that_cannot_be_a_path_is_a_plain_error(text: str, tmp_path: Path) -> None:
    assert len(message_for(text, tmp_path)) < 300


def test_a_models_folder_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    assert [model.name for model in list_models(models_folder=tmp_path / "none")] == ["tiny"]
