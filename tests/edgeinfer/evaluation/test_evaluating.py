"""Models on a text: the streamed evaluation against the direct one."""

import math
from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer.errors import EdgeInferError, SettingError
from edgeinfer.evaluation import logit_sources
from edgeinfer.evaluation.evaluating import evaluate
from edgeinfer_kernels.cpu.runtime.abi import TILE_TOKENS
from tests.random_models import RandomModel

TEXT = Path(__file__).parents[3].joinpath("LICENSE").read_text(encoding="utf-8")


def direct_perplexity(context: int, chunks: int) -> float:
    """The definition, with all logits of a window at once."""
    with edgeinfer.load("tiny", context=context, draft=None) as model:
        ids = model.tokenizer.encode(TEXT, bos=True)
        losses = []
        for first in range(0, chunks * context, context):
            window = ids[first : first + context]
            if model.tokenizer.add_bos:
                window[0] = model.tokenizer.bos_id or 0
            rows = model.logits(window).astype(np.float64)
            for index in range(context // 2, context - 1):
                total = math.log(math.fsum(np.exp(rows[index])))
                losses.append(total - rows[index][window[index + 1]])
    return math.exp(math.fsum(losses) / len(losses))


@pytest.mark.default_cases(1)
def test_perplexity_equals_the_direct_computation() -> None:
    result = evaluate("tiny", TEXT, context=64, chunks=3)
    assert result.perplexity.value == pytest.approx(direct_perplexity(64, 3), rel=1e-4)
    assert (result.tokens, result.windows, result.context) == (3 * 31, 3, 64)
    assert result.divergence is None


@pytest.mark.slow
def test_slices_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    # AMX rounds differently; the scored half of a window is shorter than the steps that use it.
    context = 2 * TILE_TOKENS - 2
    whole = evaluate("tiny", TEXT, context=context, chunks=2)
    monkeypatch.setattr(logit_sources, "SLICE_ELEMENTS", 5 * 8192)
    assert evaluate("tiny", TEXT, context=context, chunks=2).perplexity.value == pytest.approx(
        whole.perplexity.value, rel=1e-4
    )


def test_a_model_does_not_diverge_from_itself() -> None:
    result = evaluate("tiny", TEXT, base="tiny", context=32, chunks=2).divergence
    assert result is not None
    assert result.mean.value == result.maximum == result.rms_probability_change.value == 0
    assert result.same_top.value == result.perplexity_ratio.value == 1


def test_models_of_other_weights_diverge(tmp_path: Path) -> None:
    paths = [RandomModel("llama", seed=seed).write(tmp_path / f"{seed}.gguf") for seed in (1, 2)]
    received: list[tuple[int, int]] = []
    result = evaluate(
        paths[0],
        TEXT,
        base=paths[1],
        context=32,
        chunks=2,
        report=lambda done, total: received.append((done, total)),
    )
    assert received == [(1, 2), (2, 2)]
    divergence = result.divergence
    assert divergence is not None
    assert 0 < divergence.median <= divergence.percentile_99 <= divergence.maximum
    other = evaluate(paths[1], TEXT, context=32, chunks=2)
    assert divergence.base_perplexity.value == pytest.approx(other.perplexity.value, rel=1e-6)
    ratio = result.perplexity.value / other.perplexity.value
    assert divergence.perplexity_ratio.value == pytest.approx(ratio, rel=1e-6)


@pytest.mark.slow
def test_a_model_is_compared_with_itself_on_another_cache() -> None:
    result = {
        kv: evaluate("tiny", TEXT, kv=kv, base_kv="f32", context=64, chunks=2).divergence
        for kv in ("f32", "q8_0", "q4_0")
    }
    means = [divergence.mean.value if divergence else -1.0 for divergence in result.values()]
    assert means[0] == 0
    assert 0 < 10 * means[1] < means[2] < 0.05


def test_a_base_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    path = RandomModel("llama").write(tmp_path / "other.gguf")
    with pytest.raises(
        EdgeInferError, match=r"other: its vocabulary of 288 tokens isn't that of tiny \(8192\)"
    ):
        evaluate("tiny", TEXT, base=path, context=32, chunks=1)


def test_a_text_too_short_for_a_window_is_refused() -> None:
    with pytest.raises(SettingError, match="wanted at least 64 for one window"):
        evaluate("tiny", "Once upon a time", context=64)


def test_without_llama_cpp_the_error_names_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llama_cpp", None)
    with pytest.raises(EdgeInferError, match=r"--base llama\.cpp needs llama-cpp-python: pip install"):
        evaluate("tiny", TEXT, base="llama.cpp", context=32, chunks=1)


@pytest.mark.slow
@pytest.mark.llama_cpp
def test_the_built_in_model_diverges_little_from_llama_cpp() -> None:
    pytest.importorskip("llama_cpp")
    result = evaluate("tiny", TEXT, base="llama.cpp", context=128, chunks=4, threads=1).divergence
    assert result is not None
    assert result.mean.value < 1e-3
    assert result.same_top.value > 0.97
    assert result.perplexity_ratio.value == pytest.approx(1, abs=0.01)
