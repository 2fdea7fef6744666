"""Plans of models that aren't on this disk: from their shape, or from the header on the hub."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.download.hub import list_hub_models
from edgeinfer.errors import NotPulledError, OutOfMemoryError, SettingError, UnknownModelError
from edgeinfer.planning.model_plan import plan_model, plan_on_machines, plan_shape
from edgeinfer_kernels.sizes.model_sizes import PER_LAYER
from tests.edgeinfer.download.fake_hub import FakeHub
from tests.random_models import RandomModel

LAPTOP = "rtx 4060 laptop, 32GiB ram, 80GB/s ram"


@pytest.fixture(autouse=True)
def _empty_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "LLAMA_CACHE", "OLLAMA_MODELS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))  # of Windows
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_a_registry_model_is_planned_from_its_shape() -> None:
    result = plan_model("qwen3-8b", device=LAPTOP)
    assert result.model == "qwen3-8b:Q4_K_M"
    assert result.warnings == ("planned from its shape in Q4_K_M: the file is not on this disk yet",)
    assert (result.plan.placement, len(result.plan.layers)) == ("gpu", 36)
    larger = plan_model("qwen3-8b:q8_0", device=LAPTOP)
    assert larger.model == "qwen3-8b:Q8_0"
    assert larger.plan.nbytes > 1.4 * result.plan.nbytes
    assert plan_shape("qwen3-8b", "Q8_0", device=LAPTOP).plan.items == larger.plan.items


@pytest.mark.slow
def test_per_layer_embeddings_are_on_the_gpu_if_everything_else_is_and_they_fit() -> None:
    def devices(**options: Any) -> tuple[str, str]:
        plan = plan_model("gemma-4-e4b", device="rtx 4090", **options).plan
        return plan.placement, next(item.device for item in plan.items if item.item == PER_LAYER)

    assert devices() == ("gpu", "gpu")
    assert devices(vram="5GiB") == ("gpu", "disk")
    assert devices(vram="3GiB") == ("split", "disk")


@pytest.mark.slow
def test_the_context_of_the_entry_bounds_its_curve() -> None:
    plain, long = (plan_model(name, device=LAPTOP) for name in ("qwen3-4b", "qwen3-4b-2507"))
    assert plain.plan.items == long.plan.items
    assert (max(plain.curve().plans), max(long.curve().plans)) == (40960, 262144)


def test_a_model_that_does_not_fit_is_refused_with_the_bytes() -> None:
    with pytest.raises(OutOfMemoryError, match=r"^llama-3\.3-70b:Q4_K_M: the model needs .* GiB on the cpu"):
        plan_model("llama-3.3-70b", device=LAPTOP, context=200_000)


@pytest.mark.slow
def test_machines_are_compared_without_a_file() -> None:
    plans = plan_on_machines(
        ["rtx 4090", "rtx 4060 laptop, 32GiB ram"], lambda machine: plan_shape("qwen3-32b", device=machine)
    )
    assert [plan if isinstance(plan, str) else plan.placement for plan in plans.values()] == ["gpu", "split"]
    with pytest.raises(SettingError, match="saw 'cuda' among several, wanted descriptions of machines"):
        plan_on_machines(["cuda"], lambda machine: plan_shape("qwen3-32b", device=machine))


@pytest.mark.parametrize(
    ("name", "text"),
    [("qwen3-8b:Q9", r"^qwen3-8b:Q9: type Q9 is unknown; wanted one of "), ("qwen3-9", "no such model")],
)
def test_an_unknown_model_or_type_is_named(name: str, text: str) -> None:
    with pytest.raises(UnknownModelError, match=text):
        plan_model(name, device=LAPTOP)


def test_an_unknown_shape_or_a_draft_is_refused() -> None:
    with pytest.raises(SettingError, match=r"^shape: saw 'qwen9', wanted one of \d+, as "):
        plan_shape("qwen9")
    with pytest.raises(SettingError, match=r"^type Q9 is unknown; wanted one of F32, "):
        plan_shape("qwen3-8b", "Q9")
    with pytest.raises(
        SettingError, match="draft: saw 'tiny', but the vocabulary of qwen3-8b:Q4_K_M isn't known"
    ):
        plan_model("qwen3-8b", device=LAPTOP, draft="tiny")
    assert plan_model("qwen3-8b", device=LAPTOP, draft=None).plan.draft is None


def own_entry(tmp_path: Path) -> None:
    """An entry without a shape."""
    folder = tmp_path / "config" / "edgeinfer"
    folder.mkdir(parents=True)
    entry = '[own]\nrepository = "me/own-GGUF"\nfile = "own-{quant}.gguf"\nquants = ["Q8_0", "Q4_K_M"]\n'
    (folder / "models.toml").write_text(entry)


def test_without_a_shape_the_header_on_the_hub_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_entry(tmp_path)
    path = RandomModel("llama", formats=("Q8_0",)).write(tmp_path / "file.gguf")
    with FakeHub() as hub:
        there = partial(list_hub_models, endpoint=hub.url("").rstrip("/"))
        monkeypatch.setattr("edgeinfer.download.hub.list_hub_models", there)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        for quant in ("Q8_0", "Q4_K_M"):
            hub.put("me/own-GGUF", f"own-{quant}.gguf", path.read_bytes())
        result = plan_model("own", device=LAPTOP)
        assert hub.fetched() == ["own-Q4_K_M.gguf"]
        with pytest.raises(
            NotPulledError, match="no plan: its shape isn't known, and me/own-GGUF has no Q2_K"
        ):
            plan_model("own:Q2_K", device=LAPTOP)
    assert result.model == "own:Q4_K_M"
    assert result.warnings == ("planned from the header of the file on the hub",)
    assert result.plan.items == plan_model(path, device=LAPTOP).plan.items


def test_without_a_shape_and_offline_the_command_to_pull_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_entry(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(NotPulledError) as caught:
        plan_model("own", device=LAPTOP)
    assert str(caught.value).startswith(
        "own: not on this disk yet; fetch it with: edgeinfer pull own; no plan: "
    )
    assert "its shape isn't known, and me/own-GGUF: the hub can't be reached" in str(caught.value)
