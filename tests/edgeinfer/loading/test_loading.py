"""From a name to a model: options checked, one-line errors, warnings forwarded."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.errors import (
    ChatTemplateError,
    EdgeInferError,
    KernelError,
    NotPulledError,
    OutOfMemoryError,
    SettingError,
    UnknownModelError,
    UnsupportedModelError,
)
from edgeinfer.loading import engine_building
from edgeinfer.options.load_options import MAX_THREADS
from edgeinfer.tokenizer import Tokenizer
from edgeinfer_kernels.cpu.compiler.features import UnsupportedProcessorError, choose
from edgeinfer_kernels.cpu.compiler.kernel_cache import KernelBuildError
from edgeinfer_quant_formats import GGUFWriter
from edgeinfer_quant_formats.errors import FormatError
from tests.edgeinfer.conftest import ZooFile
from tests.model_zoo import ZOO
from tests.random_models import RandomModel


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"device": "tpu"}, "device: saw 'tpu', wanted 'auto', 'cpu', 'cuda', 'cuda:N' or 'cuda:0,cuda:1'"),
        (
            {"kv": "q4_0/q2_0"},
            "kv: saw 'q4_0/q2_0', wanted one of 'f32', 'f16', 'fp8', 'q8_0', 'q4_0', or two of them for "
            "keys and values, as 'q8_0/q4_0'; +f16 after one of few bits: with recent positions in f16",
        ),
        ({"draft": 3}, "draft: saw 3, wanted 'auto', 'mtp', 'lookup', 'self', a model, a Drafter, or None"),
        (
            {"draft": "none"},
            "draft: saw 'none', wanted 'auto', 'mtp', 'lookup', 'self', a model, a Drafter, or None",
        ),
        ({"engine": "vllm"}, "engine: saw 'vllm', wanted one of 'edgeinfer', 'llama.cpp', 'openai'"),
        ({"context": 0}, "context: saw 0, wanted a whole number of at least 1, or None"),
        ({"context": "4096"}, "context: saw '4096', wanted a whole number of at least 1, or None"),
        ({"threads": True}, f"threads: saw True, wanted a whole number from 1 to {MAX_THREADS}, or None"),
        (
            {"threads": 100_000},
            f"threads: saw 100000, wanted a whole number from 1 to {MAX_THREADS}, or None",
        ),
        ({"ram": "much"}, "ram: saw 'much', wanted bytes or a size like \"8GiB\""),
        ({"vram": -1}, 'vram: saw -1, wanted bytes or a size like "8GiB"'),
        (
            {"engine": "llama.cpp", "ram": "1GiB"},
            "ram: llama.cpp has no memory budget; leave out ram, or the engine",
        ),
    ],
)
def test_an_invalid_setting_is_named(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError) as caught:
        edgeinfer.load("tiny", **settings)
    assert str(caught.value) == text


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UnknownModelError, match=r"tiny1: no such model; did you mean tiny\?"):
        edgeinfer.load("tiny1")
    with pytest.raises(UnknownModelError, match=r"^draft: tiny1: no such model; did you mean tiny\?"):
        edgeinfer.load("tiny", device="cpu", draft="tiny1")
    with pytest.raises(NotPulledError, match=r"^draft: smollm2-135m: not on this disk yet; fetch it with: "):
        edgeinfer.load("tiny", device="cpu", draft="smollm2-135m")


def test_a_draft_may_be_given_as_a_path(zoo_file: ZooFile) -> None:
    path = zoo_file("llama")
    with edgeinfer.load(path, device="cpu", threads=1, draft=path) as model:
        assert model.speculator is not None
        assert model.speculator.drafter.name == path.stem


def test_damaged_files_give_one_line_format_errors(tmp_path: Path, zoo_file: ZooFile) -> None:
    whole = zoo_file("llama").read_bytes()
    damaged = {
        "cut.gguf": whole[: len(whole) // 2],
        "head.gguf": whole[:100],
        "text.gguf": b"This is a text and no model at all.",
        "empty.gguf": b"",
    }
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FormatError) as caught:
            edgeinfer.load(tmp_path / name)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_folder_is_loaded_if_it_holds_one_model(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match=r"a folder without a \.gguf file"):
        edgeinfer.load(tmp_path)
    ZOO["llama"].write(tmp_path / "only.gguf")
    with edgeinfer.load(tmp_path, threads=1) as model:
        assert model.name == "only"


def test_a_file_without_a_language_model_is_refused(tmp_path: Path) -> None:
    with GGUFWriter(tmp_path / "model.gguf", {"general.architecture": "llama"}):
        pass
    with pytest.raises(UnsupportedModelError, match=r"token_embd\.weight is missing; this file is no lang"):
        edgeinfer.load(tmp_path / "model.gguf")


def written(path: Path, **metadata: Any) -> Path:
    """The llama of the zoo with other keys (dots written as two underscores); None omits a key."""
    changed = {key.replace("__", "."): value for key, value in metadata.items()}

    class Changed(RandomModel):
        def metadata(self) -> dict[str, Any]:
            keys = {**super().metadata(), **changed}
            return {key: value for key, value in keys.items() if value is not None}

    return Changed("llama").write(path)


def test_a_file_without_a_template_loads_and_accepts_one(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", tokenizer__chat_template=None)
    with edgeinfer.load(path, threads=1) as model:
        assert model.chat_format is None
    with edgeinfer.load(path, threads=1, chat_template="{{ messages[0].content }}") as model:
        assert model.chat_format is not None
        prompt_ids = model.chat().say("he on", max_tokens=0).prompt_ids
        assert prompt_ids == model.tokenizer.encode("he on", bos=True)


def test_an_invalid_template_is_reported_on_first_use(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", tokenizer__chat_template="{% if %}")
    with edgeinfer.load(path, threads=1) as model:
        assert model.generate("he on", max_tokens=1).ids
        with pytest.raises(ChatTemplateError, match="chat template, line 1"):
            model.chat().say("Hi")


def test_a_context_beyond_training_gives_a_warning(zoo_file: ZooFile) -> None:
    with edgeinfer.load(zoo_file("llama"), context=300, threads=1) as model:
        assert model.context == 300
        assert model.warnings == (
            "the context of 300 is longer than the 256 that the model was trained for; "
            "expect worse output beyond",
        )
    with edgeinfer.load(zoo_file("llama"), threads=1) as model:
        assert (model.context, model.warnings) == (256, ())


def test_tokenizer_warnings_are_forwarded(zoo_file: ZooFile, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Tokenizer.from_metadata

    def warn(*arguments: Any) -> Any:
        tokenizer = original(*arguments)
        tokenizer.warnings = ("a remark",)
        return tokenizer

    monkeypatch.setattr(Tokenizer, "from_metadata", warn)
    with edgeinfer.load(zoo_file("llama"), threads=1) as model:
        assert model.warnings == ("a remark",)


def test_the_default_context_is_at_most_4096(tmp_path: Path) -> None:
    path = replace(ZOO["llama"], context=100_000).write(tmp_path / "model.gguf")
    with edgeinfer.load(path, threads=1) as model:
        assert model.context == 4096
    with edgeinfer.load(path, threads=1, context=5000) as model:
        assert model.context == 5000


def test_progress_counts_up_to_all_bytes(zoo_file: ZooFile) -> None:
    calls: list[tuple[int, int]] = []
    built: list[tuple[int, int]] = []
    edgeinfer.load(
        zoo_file("llama"),
        progress=lambda done, total: calls.append((done, total)),
        build_progress=lambda done, total: built.append((done, total)),
    ).close()
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1][0] == calls[-1][1] == {total for _, total in calls}.pop()
    # Another test may have built the kernels already.
    assert all(done <= total for done, total in built)


@pytest.mark.parametrize(
    ("raised", "expected", "text"),
    [
        (UnsupportedProcessorError("no such processor"), KernelError, "no such processor"),
        (KernelBuildError("building rows_Q4_0 failed"), KernelError, "building rows_Q4_0 failed"),
        (MemoryError(), OutOfMemoryError, "llama: out of memory; "),
    ],
)
def test_failures_of_lower_layers_give_a_one_line_error(
    zoo_file: ZooFile,
    monkeypatch: pytest.MonkeyPatch,
    raised: Exception,
    expected: type[EdgeInferError],
    text: str,
) -> None:
    def fail(*arguments: Any, **settings: Any) -> Callable[[], None]:
        raise raised

    monkeypatch.setattr(engine_building, "CpuBackend", fail)
    with pytest.raises(expected) as caught:
        edgeinfer.load(zoo_file("llama"))
    assert str(caught.value).startswith(text)


def test_an_instruction_set_can_be_selected_and_an_unknown_one_is_refused(zoo_file: ZooFile) -> None:
    with edgeinfer.load(zoo_file("llama"), instruction_set=choose().name, threads=1) as model:
        assert model.generate("the rain", max_tokens=1).ids
    with pytest.raises(KernelError, match=r"instruction set avx1024: this processor \(.*\) runs"):
        edgeinfer.load(zoo_file("llama"), instruction_set="avx1024")


def test_an_unknown_tokenizer_names_the_alternative_engine(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", tokenizer__ggml__model="hybriddna")
    with pytest.raises(UnsupportedModelError, match=r"'hybriddna'; wanted one of .* engine='llama\.cpp'"):
        edgeinfer.load(path)


def test_a_model_loaded_twice_gives_the_same_completion(zoo_file: ZooFile) -> None:
    completions = []
    for _ in range(2):
        with edgeinfer.load(zoo_file("gemma2"), threads=2) as model:
            completions.append(model.generate("the rain", max_tokens=10, temperature=0.0).ids)
    assert completions[0] == completions[1]


def test_any_number_of_threads_gives_the_same_completion(zoo_file: ZooFile) -> None:
    completions = []
    for threads in (1, 2, 7):
        with edgeinfer.load(zoo_file("llama"), threads=threads) as model:
            completions.append(model.generate("the rain", max_tokens=10, temperature=0.0).ids)
    assert completions[0] == completions[1] == completions[2]


def test_without_llama_cpp_the_error_names_its_install_command(
    zoo_file: ZooFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(EdgeInferError, match=r"needs llama-cpp-python: pip install 'edgeinfer\[llama-cpp\]'"):
        edgeinfer.load(zoo_file("llama"), engine="llama.cpp", threads=1)


def test_memory_mapped_weights_give_the_same_completion_and_are_in_the_plan(zoo_file: ZooFile) -> None:
    completions = []
    for repack in (True, False):
        with edgeinfer.load(zoo_file("gemma2"), threads=2, repack=repack) as model:
            completions.append(model.generate("the rain", max_tokens=10, temperature=0.0).ids)
            plan = model.plan
            assert plan is not None
            assert plan.repacking is not None
            assert (plan.repacking.bytes > 0, plan.file_bytes > 0) == (repack, not repack)
            assert plan.repacking.released == (repack and sys.platform == "linux")
            if repack:
                assert plan.repacking.seconds > 0
                assert plan.repacking.bytes == sum(
                    item.bytes for item in plan.items if item.item.split()[-1] not in ("values", "workspace")
                )
            else:
                assert "nothing was repacked" in plan.explain()
    assert completions[0] == completions[1]


def test_weights_over_the_budget_are_memory_mapped_and_give_the_same_completion(zoo_file: ZooFile) -> None:
    path, settings = zoo_file("llama"), {"threads": 1, "context": 32, "device": "cpu"}
    with edgeinfer.load(path, **settings) as model:  # type: ignore[call-overload]
        whole = model.plan
        expected = model.generate("the rain", max_tokens=10, temperature=0.0).ids
        logits = model.logits([5, 9, 30])
    with edgeinfer.load(path, **settings, repack=False) as model:  # type: ignore[call-overload]
        mapped = model.plan
    assert whole is not None
    assert mapped is not None
    cached = sum(item.bytes for item in whole.items if item.item.endswith("keys and values"))
    limit, result = whole.nbytes - cached, set()  # with more memory a shorter context would fit
    for ram in range(mapped.nbytes, limit, (limit - mapped.nbytes) // 4):
        with edgeinfer.load(path, ram=ram, **settings) as model:  # type: ignore[call-overload]
            assert model.plan is not None
            assert model.plan.bytes_on("cpu") <= ram
            assert model.plan.repacking is not None
            result.add(model.plan.repacking.bytes)
            assert any(" of the weights are memory-mapped, as " in warning for warning in model.warnings)
            assert model.generate("the rain", max_tokens=10, temperature=0.0).ids == expected
            assert np.array_equal(model.logits([5, 9, 30]), logits)
    assert len(result) > 2  # more of them are mapped with less memory
    with pytest.raises(OutOfMemoryError):
        edgeinfer.load(path, ram=mapped.nbytes // 2, **settings)  # type: ignore[call-overload]


def test_experts_and_the_head_can_be_memory_mapped(zoo_file: ZooFile) -> None:
    path, settings = zoo_file("mixtral"), {"threads": 1, "context": 32, "device": "cpu"}
    with edgeinfer.load(path, **settings) as model:  # type: ignore[call-overload]
        expected = model.logits([5, 9, 30])
    with edgeinfer.load(path, **settings, repack=False) as model:  # type: ignore[call-overload]
        assert model.plan is not None
        minimum = model.plan.nbytes
    with edgeinfer.load(path, ram=minimum + (64 << 10), **settings) as model:  # type: ignore[call-overload]
        assert model.plan is not None
        assert {layer.rest for layer in model.plan.layers} == {"disk"}
        assert np.array_equal(model.logits([5, 9, 30]), expected)


def test_a_context_over_the_budget_is_refused_with_one_that_fits(zoo_file: ZooFile) -> None:
    path = zoo_file("llama")
    with edgeinfer.load(path, threads=1, context=32, device="cpu") as model:
        assert model.plan is not None
        ram = model.plan.nbytes
    with pytest.raises(OutOfMemoryError, match=r"with a context of \d+ it fits"):
        edgeinfer.load(path, threads=1, context=512, device="cpu", ram=ram)


def test_repack_is_a_boolean_and_refused_for_llama_cpp(zoo_file: ZooFile) -> None:
    wrong: Any = "no"
    with pytest.raises(SettingError, match="repack: saw 'no', wanted True or False"):
        edgeinfer.load(zoo_file("llama"), repack=wrong)
    with pytest.raises(SettingError, match=r"repack: llama\.cpp decides it"):
        edgeinfer.load(zoo_file("llama"), repack=False, engine="llama.cpp")


def test_a_model_that_does_not_fit_is_refused_before_kernels_are_compiled(
    zoo_file: ZooFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(*arguments: Any, **settings: Any) -> None:
        raise AssertionError("kernels were asked for")

    monkeypatch.setattr(engine_building, "load_kernels", compiled)
    with pytest.raises(OutOfMemoryError):
        edgeinfer.load(zoo_file("llama"), ram="64 KiB")
