"""Files with drafts next to a model's file, and that they are listed as no models."""

from pathlib import Path

import pytest

from edgeinfer.errors import UnknownModelError
from edgeinfer.registry.draft_siblings import draft_siblings
from edgeinfer.registry.found_models import ExternalFolders
from edgeinfer.registry.registry import find_model, list_models


def put(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"GGUF")


def test_the_type_of_the_model_and_the_nearest_number_of_bits_come_first(tmp_path: Path) -> None:
    names = [f"mtp-a-{quant}.gguf" for quant in ("Q4_K_M", "Q4_0", "Q8_0", "BF16")] + ["dflash-a-Q4_K_M.gguf"]
    put(*(tmp_path / name for name in (*names, "a-Q4_K_M.gguf", "a-mtp-Q4_K_M.gguf", "mtp-a-Q4_K_M.json")))
    put(tmp_path / "dspark-a-00001-of-00002.gguf", tmp_path / "dspark-a-00002-of-00002.gguf")
    found = [path.name for path in draft_siblings(tmp_path / "a-Q4_K_M.gguf")]
    assert found == [*names, "dspark-a-00001-of-00002.gguf"]


def test_folders_above_count_in_a_snapshot_only(tmp_path: Path) -> None:
    revision = tmp_path / "models--owner--a/snapshots/0123"
    put(
        revision / "Q4_K_M/a-00001-of-00002.gguf",
        revision / "mtp-a.gguf",
        revision / "Q4_K_M/dflash-a.gguf",
        revision / "Q8_0/mtp-a.gguf",
        revision.parent / "mtp-b.gguf",
    )
    assert draft_siblings(revision / "Q4_K_M/a-00001-of-00002.gguf") == [
        revision / "Q4_K_M/dflash-a.gguf",
        revision / "mtp-a.gguf",
    ]
    put(tmp_path / "models/mtp-c.gguf", tmp_path / "models/c/c.gguf")
    assert draft_siblings(tmp_path / "models/c/c.gguf") == []
    assert draft_siblings(tmp_path / "nowhere/c.gguf") == []


def test_drafts_are_listed_as_no_models_and_found_by_name(tmp_path: Path) -> None:
    others = ExternalFolders.usual(platform="linux", environment={}, home=tmp_path)
    folder, snapshot = tmp_path / "models", others.hugging_face / "models--owner--b/snapshots/0123"
    put(folder / "a-Q8_0.gguf", folder / "mtp-a-Q8_0.gguf", snapshot / "b.gguf", snapshot / "mtp-b.gguf")
    names = [model.name for model in list_models(models_folder=folder, others=others)]
    assert {"a-Q8_0", "b"} <= set(names)
    assert not {"mtp-a-Q8_0", "mtp-b"} & set(names)
    found = find_model("mtp-a-Q8_0", models_folder=folder, others=others)
    assert found.path == folder / "mtp-a-Q8_0.gguf"
    assert find_model(snapshot, models_folder=folder, others=others).path == snapshot / "b.gguf"
    with pytest.raises(UnknownModelError, match=r"no such file; did you mean .*mtp-a-Q8_0\.gguf"):
        find_model(folder / "mtp-a-Q8.gguf", models_folder=folder, others=others)
