"""Fitting types to a goal: sensitivities are measured alone, kept, and the file reaches the goal."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.calibration.checkpoint import Checkpoint
from edgeinfer.calibration.layer_runs import EMBEDDING, LayerRuns
from edgeinfer.calibration.reference_model import reference_model
from edgeinfer.calibration.sensitivity import measure_sensitivities, tensor_groups
from edgeinfer.errors import SettingError
from edgeinfer.evaluation.scores import score
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.cpu.compiler.features import choose
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels, objects_folder
from edgeinfer_offload.machine import this_machine
from edgeinfer_quant_formats import GGUFFile, block_format, encode
from edgeinfer_quant_formats.quantizer.substituted_file import SubstitutedFile
from tests.edgeinfer.conftest import ZooFile
from tests.kernels.conftest import kernels as kernels
from tests.model_zoo import ZOO

BUILT = objects_folder(user_folder("cache"), choose())
TEXT = "the heron ate in the rain on a stone " * 40


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def built_kernels(cache: None, kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The empty cache has the compiled kernels, and their speed is measured by few forwards."""
    shutil.copytree(BUILT, tmp_path / "cache" / BUILT.parent.name / BUILT.name)
    for name in ("kernel_speed", "cached_speed", "step_speed"):
        monkeypatch.setattr(this_machine, name, partial(getattr(this_machine, name), seconds=0.0))


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", ["llama", "qwen35", "rwkv7", "gemma3n"])
def test_a_run_from_a_layer_on_has_the_divergence_of_a_whole_run(zoo_file: ZooFile, name: str) -> None:
    with GGUFFile.open(zoo_file(name)) as file:
        model = reference_model(file, 64)
        windows = model.windows(TEXT, 128)
        runs = LayerRuns(model, windows)
        groups = tensor_groups(file, model.config.architecture, len(model.spec.layers))
        for group in sorted(groups, key=lambda group: -group.layer)[:6]:
            info, spec = group.tensors[0], block_format("Q4_0")
            raw = encode(file.decode(info.name), spec)
            other = model.with_file(SubstitutedFile(file, {info.name: (spec, partial(np.asarray, raw))}))
            expected = []
            for ids in windows:
                both = [each.backend() for each in (model, other)]
                logits = []
                for backend in both:
                    x = backend.embed(ids)
                    backend.forward(x, 0)
                    logits.append(backend.logits(x))
                expected.append(score(logits[1], [0] * len(ids), logits[0]).divergence.mean())
            found = runs.divergence(other, group.layer)
            assert found == pytest.approx(np.mean(expected), rel=1e-2, abs=1e-9), group.name
        assert runs.divergence(model, EMBEDDING) == pytest.approx(0, abs=1e-9)


def test_more_bits_have_less_divergence_and_results_are_kept(zoo_file: ZooFile, tmp_path: Path) -> None:
    with GGUFFile.open(zoo_file("llama")) as file:
        model = reference_model(file, 64)
        windows, saved = model.windows(TEXT, 128), Checkpoint(tmp_path / "kept", "key")
        reports: list[int] = []
        found = measure_sensitivities(model, windows, saved, {}, lambda _, done, total: reports.append(done))
        assert reports == list(range(1, len(found) + 1))
        for each in found:
            values = list(each.divergences.values())
            assert values[-1] == 0
            assert values[0] > 0
            by_bits = [each.divergences[name] for name in ("Q4_0", "Q5_0", "Q8_0")]
            assert by_bits == sorted(by_bits, reverse=True), each.group.name
        again = measure_sensitivities(model, windows, saved, {}, lambda *_: pytest.fail("measured again"))
        assert [each.divergences for each in again] == [each.divergences for each in found]
        names = [info.name for each in found for info in each.group.tensors]
        assert len(names) == len(set(names)) == 3 * 7 + 2


@pytest.mark.slow
def test_the_file_reaches_the_goal(zoo_file: ZooFile, tmp_path: Path) -> None:
    source, target = zoo_file("llama"), tmp_path / "fitted.gguf"
    done = edgeinfer.quantize(source, target, text=TEXT, bits_per_weight=6.5)
    assert done.plan.mix.name == "fitted"
    assert 6.3 < done.plan.bits_per_weight <= 6.5
    assert len({tensor.target.name for tensor in done.plan.tensors}) > 2
    size = target.stat().st_size
    edgeinfer.quantize(source, target, text=TEXT, fit=size, overwrite=True)
    assert 0.97 * size < target.stat().st_size <= size


@pytest.mark.slow
@pytest.mark.usefixtures("built_kernels")
def test_a_speed_is_reached_by_the_rates_of_the_planner(tmp_path: Path, zoo_file: ZooFile) -> None:
    source = zoo_file("llama")
    slow = edgeinfer.quantize(source, None, tokens_per_second=1, text=TEXT, dry_run=True)
    assert all(tensor.is_copied for tensor in slow.plan.tensors)
    with pytest.raises(SettingError, match=r"saw 1e\+12 tokens/s, wanted at most .*, which is reached"):
        edgeinfer.quantize(source, None, tokens_per_second=1e12, text=TEXT, dry_run=True)


@pytest.mark.slow
@pytest.mark.usefixtures("built_kernels")
def test_without_a_text_the_model_generates_one(zoo_file: ZooFile) -> None:
    done = edgeinfer.quantize(zoo_file("llama"), None, bits_per_weight=8, dry_run=True)
    assert done.plan.bits_per_weight <= 8


@pytest.mark.default_cases(3)
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"fit": "1KiB"}, r"saw 1,024 bytes, wanted at least [\d,]+ bytes, the smallest file of this model"),
        ({"bits_per_weight": 1.0}, "saw 1 bits per weight, wanted at least 4"),
        ({"bits_per_weight": 5.0, "fit": "1GiB"}, "saw 2 of them, wanted one goal"),
        ({"bits_per_weight": -5.0}, "saw -5 bits per weight, wanted more than 0"),
        ({"bits_per_weight": 5.0, "pure": True}, "and types by name; drop one of them"),
        ({"fit": "much"}, "fit: saw 'much', wanted bytes or a size"),
    ],
)
def test_a_goal_that_is_not_reached_is_refused(
    zoo_file: ZooFile, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(SettingError, match=problem) as caught:
        edgeinfer.quantize(zoo_file("llama"), None, text=TEXT, dry_run=True, **options)
    assert "\n" not in str(caught.value)


def test_a_view_has_the_substitutes_and_the_other_tensors(tmp_path: Path) -> None:
    path = ZOO["llama"].write(tmp_path / "m.gguf")
    with GGUFFile.open(path) as file:
        name, spec = "blk.0.attn_q.weight", block_format("Q8_0")
        raw = encode(file.decode(name), spec)
        view = SubstitutedFile(file, {name: (spec, lambda: raw)})
        assert view.tensors[name].format == spec
        assert view.raw(name).shape == (64, 68)
        assert np.abs(view.decode(name) - file.decode(name)).max() < 0.1
        assert np.array_equal(view.raw("token_embd.weight"), file.raw("token_embd.weight"))
        assert view.nbytes == file.nbytes - file.tensors[name].nbytes + raw.nbytes
        view.close()
        assert file.raw(name).size
