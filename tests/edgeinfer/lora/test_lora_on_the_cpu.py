"""Models with LoRA adapters on the CPU equal those with the adapters merged into their weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.errors import SettingError
from edgeinfer_quant_formats import GGUFFile
from tests.edgeinfer.conftest import ZooFile
from tests.edgeinfer.distances import distance
from tests.edgeinfer.lora.random_adapters import MATRICES, merged, write_adapter
from tests.edgeinfer.make_logit_goldens import llama_cpp_logits, quantized
from tests.model_zoo import ZOO

IDS = np.random.default_rng(3).integers(3, 280, 40).tolist()
NAMES = ("llama", "qwen3moe", "phi3", "gemma2", "mamba2", "gpt-oss", "falcon-h1", "qwen35moe-fused")
Logits = npt.NDArray[np.float32]
Loading = Callable[..., Model]


def loaded(path: Path, **options: Any) -> Model:
    return edgeinfer.load(path, device="cpu", kv="f32", draft=None, threads=2, context=128, **options)


def logits(model: Model) -> Logits:
    """Of a long step and of a short one."""
    return np.concatenate([model.logits(IDS), model.logits(IDS[:5])])


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_model_with_an_adapter_equals_the_merged_model(
    zoo_file: ZooFile, tmp_path: Path, name: str
) -> None:
    path = zoo_file(name)
    with GGUFFile.open(path) as file:
        names = MATRICES if "output.weight" not in file.tensors else (*MATRICES, "token_embd")
    adapter = write_adapter(path, tmp_path / "a.gguf", names=names)
    with loaded(merged(path, {adapter: 0.5}, tmp_path / "merged.gguf")) as model:
        expected = logits(model)
    with loaded(path, lora=(adapter, 0.5)) as model:
        assert distance(logits(model), expected) < 1e-4
        model.set_lora(None)
        assert distance(logits(model), expected) > 0.1


@pytest.mark.slow
def test_a_quantized_model_is_as_close_to_the_merged_one_as_without_the_adapter(tmp_path: Path) -> None:
    path = quantized(replace(ZOO["llama"], seed=2)).write(tmp_path / "q.gguf")
    adapter = write_adapter(path, tmp_path / "a.gguf", names=(*MATRICES, "token_embd"), format="F16")
    with loaded(merged(path, {}, tmp_path / "floats.gguf")) as model:
        plain = logits(model)
    with loaded(merged(path, {adapter: 1.0}, tmp_path / "merged.gguf")) as model:
        expected = logits(model)
    with loaded(path) as model:
        rounding = distance(logits(model), plain)
        model.set_lora(adapter)
        assert distance(logits(model), expected) < 2 * rounding


def test_several_adapters_add_up_and_are_swapped_without_loading_the_model(
    zoo_file: ZooFile, tmp_path: Path
) -> None:
    path = zoo_file("llama")
    first = write_adapter(path, tmp_path / "first.gguf", rank=4, alpha=None)
    second = write_adapter(path, tmp_path / "second.gguf", rank=20, names=("attn_q", "ffn_down"), seed=5)
    with loaded(merged(path, {first: 0.5, second: -0.25}, tmp_path / "merged.gguf")) as model:
        both = logits(model)
    with loaded(merged(path, {second: 1.0}, tmp_path / "merged-second.gguf")) as model:
        only_second = logits(model)
    with loaded(path) as model:
        without = logits(model)
        model.set_lora([f"{first}:0.5", (second, -0.25)])
        assert distance(logits(model), both) < 1e-4
        assert [(each.path, each.scale) for each in model.lora] == [(first, 0.5), (second, -0.25)]
        model.set_lora([(first, 0), second])
        assert distance(logits(model), only_second) < 1e-4
        model.set_lora([])
        assert np.array_equal(logits(model), without)


def test_what_other_adapters_cached_is_not_used_again(zoo_file: ZooFile, tmp_path: Path) -> None:
    path = zoo_file("llama")
    adapter = write_adapter(path, tmp_path / "a.gguf")
    settings: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "raw": True}
    with loaded(path) as model:
        without = model.generate(IDS, **settings).ids
        model.set_lora(adapter)
        adapted = model.generate(IDS, **settings).ids
        assert model.generate([IDS, IDS[:30]], **settings)[0].ids == adapted
        model.set_lora(None)
        assert model.generate(IDS, **settings).ids == without != adapted


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", ["llama", "mamba2", "gpt-oss"])
def test_requests_of_a_batch_have_the_adapters(zoo_file: ZooFile, tmp_path: Path, name: str) -> None:
    path = zoo_file(name)
    adapter = write_adapter(path, tmp_path / "a.gguf")
    settings: dict[str, Any] = {"max_tokens": 10, "temperature": 0.0, "raw": True}
    prompts = [IDS[:12], IDS[8:30], IDS]
    with loaded(path, parallel=3, spill="4MiB") as model:
        without = [model.generate(each, **settings).ids for each in prompts]
        assert [each.ids for each in model.generate(prompts, **settings)] == without
        model.set_lora(adapter)
        together = [each.ids for each in model.generate(prompts, **settings)]
    with loaded(path, lora=adapter) as model:
        adapted = [model.generate(each, **settings).ids for each in prompts]
    assert together == adapted != without


@pytest.mark.parametrize("snapshots", [False, True])
def test_a_running_completion_continues_with_new_adapters(
    zoo_file: ZooFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshots: bool
) -> None:
    monkeypatch.setattr("edgeinfer.lora.model_lora.snapshots_folder", lambda: tmp_path / "snapshots")
    path = zoo_file("llama")
    adapter = write_adapter(path, tmp_path / "a.gguf")
    settings: dict[str, Any] = {"temperature": 0.0, "raw": True}
    prompt = [*IDS, *IDS, 5]
    with loaded(path, snapshots=snapshots) as model:
        model.generate(prompt, max_tokens=2, **settings)
        assert model.keep_snapshot() == snapshots
        stream = model.stream(prompt, max_tokens=12, **settings)
        for _ in range(4):
            next(stream)
        model.set_lora(adapter)
        for _ in stream:
            pass
        begun = stream.result.ids
    with loaded(path, lora=adapter) as model:
        rest = model.generate([*prompt, *begun[:4]], max_tokens=8, **settings).ids
    assert begun[4:] == rest


@pytest.mark.parametrize("draft", ["lookup", "self"])
def test_drafts_do_not_change_the_text_of_a_model_with_an_adapter(
    zoo_file: ZooFile, tmp_path: Path, draft: str
) -> None:
    path = zoo_file("llama")
    adapter = write_adapter(path, tmp_path / "a.gguf", names=(*MATRICES, "token_embd"))
    texts = []
    for each in (None, draft):
        with edgeinfer.load(path, device="cpu", threads=1, draft=each, lora=adapter) as model:
            texts.append(model.generate(IDS, max_tokens=40, temperature=0.0, raw=True).ids)
    assert texts[0] == texts[1]


def test_snapshots_belong_to_their_adapters(
    zoo_file: ZooFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeinfer.lora.model_lora.snapshots_folder", lambda: tmp_path / "snapshots")
    path = zoo_file("llama")
    adapter = write_adapter(path, tmp_path / "a.gguf")
    settings: dict[str, Any] = {"max_tokens": 2, "temperature": 0.0, "raw": True}
    prompt = IDS * 2
    cached = []
    with loaded(path, snapshots=True) as model:
        model.generate(prompt, **settings)
        assert model.keep_snapshot()
    for lora in (None, adapter, None):
        with loaded(path, snapshots=True, lora=lora) as model:
            cached.append(model.generate(prompt, **settings).speed.cached_tokens)
    assert cached[0] == cached[2] > 60
    assert cached[1] == 0


def test_embeddings_of_an_encoder_take_adapters(tmp_path: Path, zoo_file: ZooFile) -> None:
    path = zoo_file("qwen3")
    adapter = write_adapter(path, tmp_path / "a.gguf", names=("attn_", "ffn_"))
    with loaded(merged(path, {adapter: 1.0}, tmp_path / "merged.gguf")) as model:
        expected = model.embed(["a text", "another one"])
    with loaded(path, lora=adapter) as model:
        assert distance(model.embed(["a text", "another one"]), expected) < 1e-4


def test_the_plan_has_the_bytes_of_the_adapters(zoo_file: ZooFile, tmp_path: Path) -> None:
    path = zoo_file("llama")
    adapter = write_adapter(path, tmp_path / "a.gguf", rank=4, names=("blk.0.attn_q",))
    with loaded(path, lora=adapter) as model:
        assert model.plan is not None
        items = {item.item: item.bytes for item in model.plan.items}
    # a: 16 rows of 64 columns; b: 64 rows of 4; products: two rows of 16 for 256 tokens and 2 threads.
    assert items["LoRA adapters"] == 4 * (16 * 64 + 64 * 4) + 2 * 2 * 4 * 16 * 256


def test_sparse_layers_and_adapters_exclude_each_other(zoo_file: ZooFile, tmp_path: Path) -> None:
    path = zoo_file("llama")
    adapter = write_adapter(path, tmp_path / "a.gguf")
    with pytest.raises(SettingError, match="sparse: 'exact' and lora exclude each other; leave one out"):
        loaded(path, lora=adapter, sparse="exact")


@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", ["llama", "qwen3moe", "gemma2"])
def test_logits_are_those_of_llama_cpp_with_the_same_adapter(
    zoo_file: ZooFile, tmp_path: Path, name: str
) -> None:
    pytest.importorskip("llama_cpp")
    path = zoo_file(name)
    with GGUFFile.open(path) as file:
        names = MATRICES if "output.weight" not in file.tensors else (*MATRICES, "token_embd")
    adapter = write_adapter(path, tmp_path / "a.gguf", names=names)
    expected = llama_cpp_logits(path, IDS, lora_path=str(adapter), lora_scale=0.5)
    with loaded(path, lora=(adapter, 0.5)) as model:
        assert distance(model.logits(IDS), expected) < 2e-3
