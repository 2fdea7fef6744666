"""Encoders and rerankers as users load them: vectors, scores, HTTP, and what they refuse."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.errors import ContextOverflowError, EdgeInferError, SettingError
from edgeinfer.loading.draft_file import DraftFile
from edgeinfer.loading.loading import load
from edgeinfer.planning.fit import fit
from edgeinfer.planning.model_plan import model_sizes, plan_model
from edgeinfer.profiling.profiling import profile
from edgeinfer_offload.machine.description import describe_machine
from edgeinfer_quant_formats import GGUFFile
from tests.edgeinfer.encoders.make_encoder_goldens import encoder_of
from tests.edgeinfer.serving.http_client import post

pytestmark = pytest.mark.anyio
SENTENCES = ["a fox ran into a wood", "b", "two and two are four " * 9, "cat"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = encoder_of("bert", "plain").write(tmp_path_factory.mktemp("encoder") / "bert.gguf")
    with load(path, draft=None) as model:
        yield model


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = encoder_of("bert-reranker", "plain").write(tmp_path_factory.mktemp("encoder") / "reranker.gguf")
    with load(path, draft=None) as model:
        yield model


def test_a_text_has_the_same_vector_in_any_batch(encoder: Model) -> None:
    together = encoder.embed(SENTENCES * 40)
    assert together.shape == (160, 64)
    for text, vector in zip(SENTENCES, together, strict=False):
        np.testing.assert_allclose(encoder.embed(text), vector, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(together[:4], together[-4:])
    assert encoder.text_vectors(["cat"]).tokens == len(encoder.tokenizer.encode("cat", bos=True))


def test_an_encoder_completes_nothing(encoder: Model) -> None:
    for refused in (encoder.generate, encoder.stream, encoder.chat):
        with pytest.raises(SettingError, match=r"^bert is an encoder, which completes no text: use embed$"):
            refused("a fox")
    with pytest.raises(SettingError, match="use embed"):
        encoder.logits([3])
    with pytest.raises(SettingError, match="use embed"):
        encoder.generate("a fox", n=2)


def test_a_text_over_the_context_is_refused(encoder: Model) -> None:
    with pytest.raises(ContextOverflowError, match="the context holds 256"):
        encoder.embed(["cat", "cat " * 300])


def test_an_encoder_has_no_context_over_the_trained_one(tmp_path: Path) -> None:
    path = encoder_of("bert", "plain").write(tmp_path / "model.gguf")
    with load(path, context=1000, draft=None) as model:
        assert model.context == 256


def test_the_most_relevant_text_is_first(reranker: Model) -> None:
    ranked = reranker.rank("fox", SENTENCES)
    assert sorted(each.index for each in ranked) == [0, 1, 2, 3]
    assert [each.score for each in ranked] == sorted((each.score for each in ranked), reverse=True)
    assert all(each.text == SENTENCES[each.index] for each in ranked)
    alone = reranker.rank("fox", [SENTENCES[2]])[0].score
    assert alone == pytest.approx(next(each.score for each in ranked if each.index == 2), abs=1e-5)


def test_a_pair_of_word_pieces_has_one_separator_after_each(reranker: Model) -> None:
    ids, encode = reranker.tokenizer.encode_pair("fox", "cat"), reranker.tokenizer.encode  # type: ignore[attr-defined]
    assert ids == [2, *encode("fox"), 3, *encode("cat"), 3]


def test_invalid_ranking_inputs_are_refused(encoder: Model, reranker: Model) -> None:
    assert reranker.rank("fox", []) == []
    with pytest.raises(SettingError, match="rank: bert is no reranker"):
        encoder.rank("fox", ["cat"])
    for wrong in (None, "", 3):
        with pytest.raises(SettingError, match=r"rank: saw .* as query, wanted a text"):
            reranker.rank(wrong, ["cat"])  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="rank: saw int 3, wanted a text, or texts"):
        reranker.rank("fox", ["cat", 3])  # type: ignore[list-item]


async def test_vectors_over_http(encoder: Model) -> None:
    reply = (await post(encoder, "/v1/embeddings", {"input": SENTENCES * 10})).json()
    given = np.array([each["embedding"] for each in reply["data"]], np.float32)
    np.testing.assert_allclose(given, encoder.embed(SENTENCES * 10), rtol=0, atol=1e-6)
    assert [each["index"] for each in reply["data"]] == list(range(40))
    refused = await post(encoder, "/v1/completions", {"prompt": "a fox"})
    assert refused.status_code == 400
    assert "use embed" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v1/reranking", "/reranking"])
async def test_ranking_over_http(reranker: Model, path: str) -> None:
    texts: list[Any] = [*SENTENCES * 9, {"text": "dog"}]
    body = {"query": "fox", "documents": texts, "top_n": 3, "return_documents": True}
    reply = (await post(reranker, path, body)).json()
    expected = reranker.ranking("fox", [*SENTENCES * 9, "dog"])
    scores = [each["relevance_score"] for each in reply["results"]]
    assert scores == pytest.approx([each.score for each in expected.texts[:3]], abs=1e-5)
    plain = [text if isinstance(text, str) else text["text"] for text in texts]
    assert [each["document"]["text"] for each in reply["results"]] == [
        plain[each["index"]] for each in reply["results"]
    ]
    assert reply["usage"]["total_tokens"] == expected.tokens


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"query": "fox"}, "documents: wanted a list of texts"),
        ({"query": "fox", "documents": [3]}, "documents: wanted a list of texts"),
        ({"query": "fox", "documents": ["x"] * 3_000}, "documents: saw 3000, wanted 2048 at most"),
        ({"documents": ["cat"]}, "query: wanted a text"),
        ({"query": "fox", "documents": ["cat"], "top_n": 0}, "top_n: saw 0"),
        ({"query": "fox", "texts": ["cat"]}, "texts: no such field; did you mean documents?"),
    ],
)
async def test_wrong_ranking_requests_are_refused(reranker: Model, body: Any, message: str) -> None:
    reply = await post(reranker, "/v1/rerank", body)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


async def test_a_model_without_a_classifier_ranks_nothing(encoder: Model) -> None:
    reply = await post(encoder, "/v1/rerank", {"query": "fox", "documents": ["cat"]})
    assert reply.status_code == 400
    assert "bert is no reranker" in reply.json()["error"]["message"]


def test_a_closed_encoder_is_an_error(tmp_path: Path) -> None:
    with edgeinfer.load(encoder_of("bert", "plain").write(tmp_path / "model.gguf"), draft=None) as model:
        pass
    with pytest.raises(EdgeInferError, match="has been closed"):
        model.embed("cat")


def test_a_plan_has_a_speed_of_texts_only(tmp_path: Path) -> None:
    path = encoder_of("bert", "plain").write(tmp_path / "model.gguf")
    for device, step in (("h200", 4096), ("cpu, 60 GB/s ram", 512)):
        plan = plan_model(path, device=device).plan
        assert plan.prediction.decode_tokens_per_second == 0
        assert f"tokens/s, in steps of at most {step} tokens" in plan.explain()
        assert "decode" not in plan.explain()
    whole = plan_model(path, device="h200").plan
    assert {item.device for item in whole.items if item.item.startswith("layer")} == {"gpu"}
    assert fit(model_sizes(path), describe_machine("h200")).tokens_per_second is None


def test_an_encoder_without_kernels_on_a_gpu_is_planned_for_the_cpu(tmp_path: Path) -> None:
    path = encoder_of("jina-bert-v2", "plain").write(tmp_path / "model.gguf")
    plan = plan_model(path, device="h200").plan
    assert "a norm of whole rows" in (plan.limit_reason or "")
    assert {item.device for item in plan.items} <= {"cpu", "disk"}


def test_an_encoder_is_no_draft_model_and_has_no_profile(tmp_path: Path) -> None:
    path = encoder_of("bert", "plain").write(tmp_path / "model.gguf")
    with pytest.raises(SettingError, match="use embed"):
        profile(path, ["a fox ran into a wood " * 40])
    with GGUFFile.open(path) as file, pytest.raises(SettingError, match="draft: model is an encoder"):
        DraftFile.open(path, file, required=True)
