"""Embeddings of texts: pooling, and comparison with llama.cpp."""

import numpy as np
import pytest

import edgeinfer
from edgeinfer.embedding import normalized, pooled, pooling_of
from edgeinfer.errors import ContextOverflowError, EdgeInferError, SettingError
from edgeinfer_quant_formats import GGUFFile, decode
from tests.edgeinfer.conftest import ZooFile

TEXTS = ["The fox ran into the wood.", "A small fox ran into a forest.", "Two and two are four."]


@pytest.mark.parametrize("name", ["llama", "starcoder2", "qwen3moe"])
def test_hidden_states_times_the_head_are_the_logits(zoo_file: ZooFile, name: str) -> None:
    path = zoo_file(name)
    with edgeinfer.load(path, device="cpu", draft=None) as model:
        ids = list(range(3, 30))
        rows, logits = model.engine.rows(ids), model.logits(ids)
    with GGUFFile.open(path) as file:
        name = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
        info = file.tensors[name]
        head = decode(file.raw(name), info.format.name).reshape(-1, rows.shape[1])
    assert rows.shape == (27, head.shape[1])
    np.testing.assert_allclose(rows @ head.T, logits, rtol=0, atol=0.02 * np.abs(logits).max())


def test_vectors_are_normalized_means_by_default() -> None:
    rows = np.array([[3.0, 0.0], [0.0, 4.0], [3.0, 8.0]], np.float32)
    np.testing.assert_allclose(pooled(rows, "mean"), [2, 4])
    np.testing.assert_allclose(pooled(rows, "cls"), [3, 0])
    np.testing.assert_allclose(pooled(rows, "last"), [3, 8])
    np.testing.assert_allclose(normalized(pooled(rows, "mean")), np.array([2, 4]) / np.sqrt(20), rtol=1e-6)
    assert not normalized(pooled(np.zeros((2, 3), np.float32), "mean")).any()


def test_a_text_has_the_same_vector_in_any_batch() -> None:
    with edgeinfer.load("tiny", device="cpu", draft=None) as model:
        together = model.embed(TEXTS)
        assert together.shape == (3, model.engine.rows([1]).shape[1])
        for text, vector in zip(TEXTS, together, strict=True):
            np.testing.assert_array_equal(model.embed(text), vector)
            assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-6)
        near, far = together[0] @ together[1], together[0] @ together[2]
        assert near > far
        last = model.embed(TEXTS[0], pooling="last", normalize=False)
        ids = model.generate(TEXTS[0], max_tokens=0).prompt_ids
        assert model.text_vectors([TEXTS[0]] * 2).tokens == 2 * len(ids)
        model.engine.rewind(0)
        np.testing.assert_array_equal(last, model.engine.rows(ids)[-1])
        # A completion after it doesn't depend on the cache contents.
        assert model.generate("Once", max_tokens=5, temperature=0.0).ids


@pytest.mark.parametrize(
    ("number", "name"),
    [(None, "mean"), (0, "mean"), (1, "mean"), (2, "cls"), (3, "last"), (4, "mean"), ("x", "mean")],
)
def test_the_file_gives_the_pooling_type(number: object, name: str) -> None:
    assert pooling_of(number) == name


def test_invalid_embedding_inputs_are_refused(zoo_file: ZooFile) -> None:
    with edgeinfer.load(zoo_file("llama"), device="cpu", context=16, draft=None) as model:
        assert model.embed([]).shape[0] == 0
        for wrong in (None, 5, ["a", None]):
            with pytest.raises(SettingError, match=r"^embed: saw \w+ .*, wanted a text, or texts$"):
                model.embed(wrong)  # type: ignore[arg-type]
        with pytest.raises(SettingError, match="pooling: saw 'rank', wanted mean, cls, last"):
            model.embed("the rain", pooling="rank")
        with pytest.raises(ContextOverflowError, match="the context holds 16"):
            model.embed("the rain " * 30)
    with pytest.raises(EdgeInferError, match="has been closed"):
        model.embed("the rain")


@pytest.mark.default_cases(1)
@pytest.mark.llama_cpp
@pytest.mark.parametrize(("pooling", "number"), [("mean", 1), ("last", 3)])
def test_vectors_equal_those_of_llama_cpp(pooling: str, number: int) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    with edgeinfer.load("tiny", device="cpu", draft=None) as model:
        ours = model.embed(TEXTS, pooling=pooling)
        path = edgeinfer.registry.registry.find_model("tiny").path
    one_thread = {"n_threads": 1, "n_threads_batch": 1}
    theirs = llama_cpp.Llama(
        str(path), embedding=True, pooling_type=number, n_ctx=512, verbose=False, **one_thread
    )
    for text, vector in zip(TEXTS, ours, strict=True):
        other = np.array(theirs.embed(text), np.float64)
        assert vector @ other / np.linalg.norm(other) > 0.9995
