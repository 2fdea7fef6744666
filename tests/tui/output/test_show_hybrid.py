"""`show`, `plan` and `run` on hybrid models."""

import json
import sys
from pathlib import Path

import pytest

import edgeinfer
from edgeinfer.errors import SettingError
from edgeinfer_kernels.caches.layer_cache import SPARE_POSITIONS
from edgeinfer_tui.output.columns import shown_bytes
from tests.model_zoo import ZOO
from tests.tui.conftest import CommandLine

HYBRIDS = {
    name: model
    for name, model in ZOO.items()
    if model.convolutions or (model.hybrid and model.hybrid.is_recurrent)
}


def lines_of(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", HYBRIDS)
def test_show_and_plan_count_recurrent_layers_and_their_state(
    name: str, edgeinfer: CommandLine, tmp_path: Path
) -> None:
    path = HYBRIDS[name].write(tmp_path / "hybrid.gguf")
    facts = json.loads(edgeinfer("show", str(path), "--json").out)["facts"]
    assert facts["recurrent layers"] >= 1
    assert max(facts["recurrent layers"], facts["attention layers"]) <= HYBRIDS[name].layers
    assert (facts["attention layers"] == 0) == name.startswith(("mamba", "rwkv"))
    shown = lines_of(edgeinfer("show", str(path)).out)
    assert f"recurrent layers {facts['recurrent layers']}" in shown
    state = facts["recurrent state bytes"]
    assert f"recurrent state {shown_bytes(state)} at any context" in shown
    plan = json.loads(edgeinfer("plan", str(path), "--device", "cpu", "--json").out)
    items = [item for item in plan["items"] if "recurrent state" in item["item"]]
    # The line of a layer with both has its keys and values in float16 too.
    caches = sum(item["item"].endswith("recurrent state and keys and values") for item in items)
    positions, elements = plan["context"] + SPARE_POSITIONS, HYBRIDS[name].kv_heads * HYBRIDS[name].head_dim
    cache_bytes = 2 * positions * 2 * elements
    assert sum(item["bytes"] for item in items) == state + caches * cache_bytes


def test_show_of_a_transformer_has_no_recurrent_layers(edgeinfer: CommandLine) -> None:
    assert "recurrent" not in edgeinfer("show", "tiny").out


@pytest.mark.parametrize("policy", ["shift", "h2o"])
def test_a_context_shift_is_refused_in_one_line(
    policy: str, edgeinfer: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    path = HYBRIDS["qwen35"].write(tmp_path / "hybrid.gguf")
    outcome = edgeinfer("run", str(path), "hello", "--device", "cpu", "--context-overflow", policy)
    assert (outcome.code, outcome.out) == (1, "")
    last = outcome.err.splitlines()[-1]
    assert last.startswith(f"edgeinfer: --context-overflow: saw '{policy}', but tokens can't be evicted from")


def test_python_refuses_a_context_shift(tmp_path: Path) -> None:
    path = HYBRIDS["lfm2"].write(tmp_path / "hybrid.gguf")
    with (
        edgeinfer.load(path, device="cpu", draft=None) as model,
        pytest.raises(SettingError, match="can't be evicted from the state of recurrent layers"),
    ):
        model.generate("hello", context_overflow="shift")
