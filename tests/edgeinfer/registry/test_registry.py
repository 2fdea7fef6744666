"""From a name to a model's files."""

import hashlib
import os
import tomllib
from pathlib import Path

import pytest

from edgeinfer.errors import NotPulledError, RegistryError, UnknownModelError
from edgeinfer.options import SamplingParams
from edgeinfer.registry.found_models import ExternalFolders
from edgeinfer.registry.model_file import bits_of, quant_of
from edgeinfer.registry.registry import find_model, list_models, read_registry
from edgeinfer.registry.registry_listing import parameter_count
from edgeinfer.shapes.known_shapes import SHAPES

ROOT = Path(__file__).resolve().parents[3]
NO_OTHER_MODELS = ExternalFolders.usual(environment={}, home=ROOT / "no such folder")
"""A machine without models of other programs."""


def make_models(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"GGUF")
    return folder


def message_for(expected: str | Path, folder: Path) -> str:
    with pytest.raises(UnknownModelError) as caught:
        find_model(expected, models_folder=folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_change_of_the_entries_changes_no_later_reading() -> None:
    read_registry().clear()
    assert "tiny" in read_registry()


@pytest.mark.parametrize("nothing", [None, "", "tiny"])
def test_the_default_is_the_built_in_model_with_its_draft(nothing: str | None) -> None:
    model = find_model(nothing)
    assert (model.name, model.source, model.parameters, model.context) == ("tiny", "built in", "30M", 1024)
    assert model.path.name == "edgeinfer-tiny-30m-Q4_K_M.gguf"
    assert model.draft_path is not None
    assert model.draft_path.name == "edgeinfer-tiny-draft-5m-Q8_0.gguf"
    assert model.prompt_style == "raw"


def test_the_built_in_files_match_the_registry() -> None:
    entry = tomllib.loads((ROOT / "models.toml").read_text(encoding="utf-8"))["tiny"]
    model = find_model("tiny")
    assert model.draft_path is not None
    assert model.head_path is not None
    for path, prefix in [(model.path, ""), (model.draft_path, "draft_"), (model.head_path, "head_")]:
        assert path.stat().st_size == entry[f"{prefix}size_bytes"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == entry[f"{prefix}sha256"]


def test_the_built_in_file_is_recognized_by_its_path() -> None:
    assert find_model(find_model("tiny").path).name == "tiny"


def test_a_path_needs_no_registry(tmp_path: Path) -> None:
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
    output = message_for(tmp_path, tmp_path)
    assert "a folder with 10 models; name one of m00.gguf, m01.gguf" in output
    assert output.endswith("m07.gguf and 2 more")


def test_a_folder_without_models_is_reported(tmp_path: Path) -> None:
    assert message_for(tmp_path, tmp_path).endswith(
        "a folder without a .gguf file, or config.json and safetensors; name a model"
    )


def test_the_models_folder_is_searched_by_name(tmp_path: Path) -> None:
    make_models(tmp_path, "deep/own.gguf")
    assert find_model("own", models_folder=tmp_path).source == "models folder"
    assert find_model("own.gguf", models_folder=tmp_path).path == tmp_path / "deep" / "own.gguf"


def test_a_misspelled_name_suggests_the_nearest(tmp_path: Path) -> None:
    make_models(tmp_path, "granite-2b.gguf")
    assert message_for("tinny", tmp_path).startswith("tinny: no such model; did you mean tiny? Name one of")
    assert "did you mean granite-2b? " in message_for("granit-2b", tmp_path)
    assert "did you mean qwen3-8b? " in message_for("qwen3-8bb", tmp_path)
    assert "known: tiny, granite-2b, smollm2-135m," in message_for("zzz", tmp_path)
    assert message_for("zzz", tmp_path).endswith("`edgeinfer list --all` or the path of a .gguf file")


def test_a_misspelled_path_suggests_its_neighbors(tmp_path: Path) -> None:
    make_models(tmp_path, "granite.gguf")
    assert message_for(tmp_path / "granit.gguf", tmp_path).endswith(
        f"no such file; did you mean {tmp_path / 'granite.gguf'}?"
    )
    assert "has no .gguf file like it" in message_for(tmp_path / "zzz.gguf", tmp_path)
    assert (
        message_for("no/such/x.gguf", tmp_path) == "no/such/x.gguf: no such file, nor is there such a folder"
    )


@pytest.mark.parametrize("address", ["hf:owner/name", "https://example.org/own.gguf"])
def test_a_url_suggests_the_pull_command(address: str, tmp_path: Path) -> None:
    assert message_for(address, tmp_path).endswith(f"fetch this one with: edgeinfer pull {address}")


def test_an_unavailable_quantization_lists_the_available_ones(
    tmp_path: Path,
) -> None:
    assert message_for("tiny:Q8_0", tmp_path) == "tiny:Q8_0: no such quantization; there is tiny"


@pytest.mark.parametrize("text", ["x" * 5000, "a\0b", "line\nline", "~nobody-at-all/x"])
def test_an_invalid_path_is_a_one_line_error(text: str, tmp_path: Path) -> None:
    assert len(message_for(text, tmp_path)) < 300


def test_broken_links_and_folders_are_no_models(tmp_path: Path) -> None:
    make_models(tmp_path, "sound.gguf")
    (tmp_path / "gone.gguf").symlink_to(tmp_path / "unplugged" / "gone.gguf")
    (tmp_path / "folder.gguf").mkdir()
    assert [model.name for model in list_models(models_folder=tmp_path)] == ["tiny", "sound"]
    assert find_model(tmp_path).name == "sound"


def test_a_models_folder_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    assert [model.name for model in list_models(models_folder=tmp_path / "none")] == ["tiny"]


def pulled(folder: Path, file: str, seconds: int = 0) -> Path:
    """A file of a registry model as `edgeinfer pull` stores it, `seconds` after the others."""
    path = make_models(folder, file) / file
    os.utime(path, (seconds, seconds))
    return path


def test_a_registry_model_that_is_not_downloaded_names_the_pull_command(tmp_path: Path) -> None:
    with pytest.raises(NotPulledError) as caught:
        find_model("qwen3-8b:Q6_K", models_folder=tmp_path, others=NO_OTHER_MODELS)
    assert str(caught.value) == (
        "qwen3-8b:Q6_K: not on this disk yet; fetch it with: edgeinfer pull qwen3-8b:Q6_K"
    )
    assert caught.value.name == "qwen3-8b:Q6_K"


def test_the_most_recently_downloaded_quantization_is_selected(tmp_path: Path) -> None:
    pulled(tmp_path, "Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q8_0.gguf", 100)
    last = pulled(tmp_path, "Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf", 200)
    assert find_model("qwen3-8b", models_folder=tmp_path, others=NO_OTHER_MODELS).path == last
    result = find_model("qwen3-8b:q8_0", models_folder=tmp_path, others=NO_OTHER_MODELS)
    assert (result.name, result.path.name) == ("qwen3-8b:Q8_0", "Qwen3-8B-Q8_0.gguf")
    assert result.licence == "Apache-2.0"
    with pytest.raises(NotPulledError):
        find_model("qwen3-8b:Q6_K", models_folder=tmp_path, others=NO_OTHER_MODELS)
    listed = list_models(models_folder=tmp_path, others=NO_OTHER_MODELS)
    assert [model.name for model in listed] == ["tiny", "qwen3-8b:Q8_0", "qwen3-8b:Q4_K_M"]


def test_a_registry_draft_is_used_once_it_is_downloaded(tmp_path: Path) -> None:
    pulled(tmp_path, "Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q8_0.gguf")
    assert find_model("qwen3-8b", models_folder=tmp_path, others=NO_OTHER_MODELS).draft_path is None
    draft = pulled(tmp_path, "Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf")
    assert find_model("qwen3-8b", models_folder=tmp_path, others=NO_OTHER_MODELS).draft_path == draft


def test_a_split_registry_model_is_found_by_its_first_part(tmp_path: Path) -> None:
    folder = "ggml-org/gpt-oss-120b-GGUF/gpt-oss-120b-MXFP4"
    make_models(tmp_path, f"{folder}-00001-of-00002.gguf", f"{folder}-00002-of-00002.gguf")
    result = find_model("gpt-oss-120b", models_folder=tmp_path, others=NO_OTHER_MODELS)
    assert (result.path.name, result.size_bytes) == ("gpt-oss-120b-MXFP4-00001-of-00002.gguf", 8)


def test_every_draft_is_an_entry_or_a_file_of_the_package() -> None:
    entries = read_registry()
    drafts = {entry.draft for entry in entries.values() if entry.draft} - {None}
    assert {draft for draft in drafts if draft not in entries} == {"edgeinfer-tiny-draft-5m-Q8_0.gguf"}
    assert len(entries) >= 30


def test_every_entry_has_a_description_and_a_source() -> None:
    for entry in read_registry().values():
        assert entry.notes, entry.name
        assert entry.licence, entry.name
        assert entry.parameters, entry.name
        assert entry.context, entry.name
        files = [entry.file_of(quant) for quant in entry.quants]
        assert len(set(files)) == len(files), entry.name
        assert all(quant_of(file) == quant for file, quant in zip(files, entry.quants, strict=True) if quant)
        assert entry.repository or entry.name == "tiny"


def test_every_entry_has_a_valid_form() -> None:
    """What isn't published is left out, never guessed: a digest has 64 digits, a size is plausible."""
    for name, entry in read_registry().items():
        assert set(entry.size_bytes) | set(entry.sha256) <= set(entry.quants), name
        assert all(size > 10_000_000 for size in entry.size_bytes.values()), name
        assert len(set(entry.sha256.values())) == len(entry.sha256), name
        assert entry.usual_quant in entry.quants, name
        assert entry.shape == "" or entry.shape in SHAPES, name
        assert entry.released == "" or "2024-01" <= entry.released <= "2026-12", name
        assert (entry.kind != "text") == entry.notes.startswith(("embeddings ", "scores ")), name
        assert len(entry.notes) < 90, name
        assert entry.notes[-1] not in ".;,", name
        assert len(entry.sparsity) < 100, name
        assert entry.sparsity == "" or entry.sparsity[-1] not in ".;,", name
        count = parameter_count(entry.parameters)
        assert 1e7 < count < 2e12, name
        for quant, size in entry.size_bytes.items():
            assert 0.4 * bits_of(quant or "Q4") / 8 < size / count < 2.6 * bits_of(quant or "Q4") / 8, name
    digests = [digest for entry in read_registry().values() for digest in entry.sha256.values()]
    assert len(set(digests)) == len(digests)


SPARSE = (
    "nemotron-mini-4b",
    "nemotron-3-nano-4b",
    "afm-4.5b",
    "smallthinker-4b-a0.6b",
    "bamboo-7b",
    "relullama-7b",
    "prosparse-7b",
)


def test_entries_with_a_relu_say_what_their_sparsity_brings() -> None:
    entries = read_registry()
    assert all("ReLU" in entries[name].sparsity for name in SPARSE)
    assert entries["llama-3.1-8b"].sparsity == ""


CARD_PARAMETERS = {"temperature", "top_p", "top_k", "min_p", "presence_penalty", "repeat_penalty"}
HYBRIDS = (
    "qwen3.5-", "qwen3.6-", "qwen3.8-", "qwen3-next", "qwen3-coder-next", "nemotron-3", "lfm2-", "lfm2.5-",
    "granite-4.0-h-", "falcon-h1-", "jamba-", "mamba-",
)  # fmt: skip


def test_every_hybrid_family_has_an_entry_whose_sampling_is_valid() -> None:
    entries = read_registry()
    for family in HYBRIDS:
        members = [entry for name, entry in entries.items() if name.startswith(family)]
        assert members, family
        for entry in members:
            SamplingParams.from_keywords(entry.sampling)
            assert set(entry.sampling) <= CARD_PARAMETERS, entry.name
            assert set(entry.size_bytes) | set(entry.sha256) <= set(entry.quants)
    assert entries["qwen3.5-4b"].sampling["presence_penalty"] == 1.5
    assert entries["llama-3.1-8b"].sampling == {}


def write_own(folder: Path, text: str) -> Path:
    path = folder / "own.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_user_entries_override_the_registry(tmp_path: Path) -> None:
    own = write_own(
        tmp_path,
        """
        [mine]
        file = "mine.gguf"
        url = "https://example.org/mine.gguf"
        size_bytes = 5
        [qwen3-8b]
        repository = "me/better-GGUF"
        file = "better-{lower_quant}.gguf"
        quants = ["Q4_0"]
        """,
    )
    entries = read_registry(own)
    assert entries["mine"].url_of("") == "https://example.org/mine.gguf"
    assert entries["mine"].size_bytes == {"": 5}
    assert entries["qwen3-8b"].file_of("Q4_0") == "better-q4_0.gguf"
    assert "tiny" in entries


WRONG = {
    "no toml": "no TOML: ",
    '"a b" = {}': "[a b]: wanted a name of letters, digits and",
    "x = 1": "[x]: saw 1, wanted a table with a file",
    "[x]": "[x]: file is missing",
    "[x]\nfile = 3": "[x]: file: saw 3, wanted a text",
    "[x]\nfile = 'a'\nfil = 'b'": "[x]: fil: no such key; there are context, draft,",
    "[x]\nfile = 'a'\nrepository = 'b'": "[x]: repository: saw 'b', wanted owner/name",
    "[x]\nfile = 'a-{quant}'": "[x]: quants: saw [], wanted a list as",
    "[x]\nfile = 'a'\nsha256 = 'b'": "[x]: sha256: saw 'b', wanted 64 hexadecimal digits",
    "[x]\nfile = 'a'\nsize_bytes = 0": "[x]: size_bytes: saw 0, wanted a number of bytes",
    "[x]\nfile = 'a'\nsize_bytes.Q4_0 = 1": "[x]: size_bytes.Q4_0: not among the quants",
    "[x]\nfile = 'a'\ncontext = 'big'": "[x]: context: saw 'big', wanted a number of tokens",
    "[x]\nfile = 'a'\nsampling = 1": "[x]: sampling: saw 1, wanted a table of sampling parameters",
    "[x]\nfile = 'a'\nsampling.top_ks = 1": "[x]: sampling: top_ks: no such option; did you mean top_k?",
    "[x]\nfile = 'a'\nsampling.top_p = 2": "[x]: sampling: top_p: saw 2, wanted a number from 0 to 1",
    "[x]\nfile = 'a'\nshape = 'big'": "[x]: shape: saw 'big', wanted one of smollm2-135m, ",
    "[x]\nfile = 'a'\nkind = 'image'": "[x]: kind: saw 'image', wanted text or embedding or scores",
    "[x]\nfile = 'a'\nreleased = 'May'": "[x]: released: saw 'May', wanted a month as 2025-04",
    "[x]\nfile = 'a'\nprompt_style = 'b'": "[x]: prompt_style: saw 'b', wanted raw or chat",
}


@pytest.mark.parametrize(("text", "message"), WRONG.items(), ids=list(WRONG.values()))
def test_an_invalid_entry_is_named(text: str, message: str, tmp_path: Path) -> None:
    own = write_own(tmp_path, text)
    with pytest.raises(RegistryError) as caught:
        read_registry(own)
    assert str(caught.value).startswith(f"{own}: {message}")
