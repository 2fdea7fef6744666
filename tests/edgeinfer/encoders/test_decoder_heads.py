"""Decoders as embedding models and rerankers, as Qwen3-Embedding and Qwen3-Reranker are."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.errors import SettingError
from tests.edgeinfer.encoders.make_encoder_goldens import POOLED, llama_cpp_rows
from tests.random_models import RandomModel

TEXTS = ["a fox ran into a wood", "b", "two and two are four " * 4]
TEMPLATE = "judge {query} and {document}: "
LAST, RANK = 3, 4


@dataclass(frozen=True)
class Reranker(RandomModel):
    """A decoder with the classes yes and no, if `has_classifier`, else with these tokens."""

    has_classifier: bool = True

    def metadata(self) -> dict[str, Any]:
        found = super().metadata() | {"general.name": "Random Reranker"}
        if self.has_classifier:
            found["tokenizer.chat_template.rerank"] = TEMPLATE
            return found | {f"{self.architecture}.classifier.output_labels": ["yes", "no"]}
        words = ["▁y", "▁ye", "▁yes", "▁n", "▁no"]
        tokens = found["tokenizer.ggml.tokens"]
        return found | {"tokenizer.ggml.tokens": [*tokens[: -len(words)], *words]}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        classifier: dict[str, tuple[int, ...]] = {"cls.output.weight": (2, self.width)}
        return super().tensors() | (classifier if self.has_classifier else {})


@pytest.mark.llama_cpp
def test_scores_of_a_classifier_equal_llama_cpp(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    path = Reranker("qwen3", extra={"pooling_type": RANK}).write(tmp_path / "model.gguf")
    with edgeinfer.load(path, draft=None) as model:
        ranked = model.rank("fox", TEXTS)
        ids = [model.tokenizer.encode(f"judge fox and {text}: ") for text in TEXTS]
        counted = model.ranking("fox", TEXTS).tokens
    theirs = llama_cpp_rows(path, POOLED, ids)[:, 0]
    ours = np.array([each.score for each in sorted(ranked, key=lambda each: each.index)])
    print(f"llama.cpp {theirs}, edgeinfer {ours}")
    assert ((ours > 0) & (ours < 1)).all()
    assert counted == sum(map(len, ids))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-3)


def test_without_a_classifier_the_score_is_the_probability_of_yes(tmp_path: Path) -> None:
    path = Reranker("qwen3", context=1024, has_classifier=False).write(tmp_path / "model.gguf")
    with edgeinfer.load(path, draft=None) as model:
        ranked = model.rank("fox", TEXTS)
        yes, no = (model.tokenizer.encode(answer) for answer in ("yes", "no"))
        assert len(yes) == len(no) == 1
        assert sorted(each.index for each in ranked) == [0, 1, 2]
        assert all(0 < each.score < 1 for each in ranked)
        assert model.rank("fox", TEXTS[1:2])[0].score == pytest.approx(
            next(each.score for each in ranked if each.index == 1), abs=1e-5
        )


def test_a_text_contains_no_special_tokens(tmp_path: Path) -> None:
    path = Reranker("qwen3").write(tmp_path / "model.gguf")
    with edgeinfer.load(path, draft=None) as model:
        plain, special = "a fox", "</s>"
        assert len(model.tokenizer.encode(special, special=True)) < len(model.tokenizer.encode(special))
        parts = [model.tokenizer.encode(part) for part in ("judge ", special, " and ", plain, ": ")]
        assert model.ranking(special, [plain]).tokens == sum(map(len, parts))


def test_a_decoder_that_is_no_reranker_ranks_nothing(tmp_path: Path) -> None:
    path = RandomModel("qwen3").write(tmp_path / "model.gguf")
    with edgeinfer.load(path, draft=None) as model, pytest.raises(SettingError, match="model is no reranker"):
        model.rank("fox", TEXTS)


@pytest.mark.llama_cpp
@pytest.mark.parametrize("formats", [("F32",), ("Q8_0",)])
@pytest.mark.usefixtures("without_amx")  # its rounding isn't what is compared
def test_a_vector_is_the_last_hidden_state(tmp_path: Path, formats: tuple[str, ...]) -> None:
    pytest.importorskip("llama_cpp")
    path = RandomModel("qwen3", extra={"pooling_type": LAST}, formats=formats).write(tmp_path / "model.gguf")
    with edgeinfer.load(path, draft=None) as model:
        ours = model.embed(TEXTS)
        ids = [model.tokenizer.encode(text, bos=True) for text in TEXTS]
    theirs = llama_cpp_rows(path, POOLED, ids)
    cosines = (ours * theirs).sum(axis=1) / np.linalg.norm(theirs, axis=1)
    print(f"{formats}: 1 - cosine {1 - cosines}")
    assert (cosines > (0.99999 if formats == ("F32",) else 0.999)).all()
