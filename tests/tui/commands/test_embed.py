"""`edgeinfer embed` and `rank`: what they print and refuse."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import edgeinfer as library
from edgeinfer_tui.commands import embed_command
from tests.edgeinfer.encoders.make_encoder_goldens import encoder_of
from tests.tui.conftest import CommandLine
from tests.tui.fake_library import FakeModel

TEXTS = ["a fox ran into a wood", "cat", "two and two are four"]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """`TEXTS` and a blank line on standard input."""
    data = "\n".join([TEXTS[0], "", *TEXTS[1:]]).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.fixture
def encoder(tmp_path: Path) -> str:
    path = str(encoder_of("bert", "plain").write(tmp_path / "bert.gguf"))
    library.load(path, draft=None, device="cpu").close()  # compiles its kernels
    return path


def test_each_line_of_stdin_becomes_a_line_with_its_vector(
    edgeinfer: CommandLine, lines: None, encoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed_command, "TEXTS_PER_CALL", 2)
    outcome = edgeinfer("embed", encoder, "--device", "cpu")
    assert (outcome.code, outcome.err) == (0, "")
    vectors = np.array([json.loads(line) for line in outcome.out.splitlines()])
    with library.load(encoder, draft=None) as model:
        np.testing.assert_allclose(vectors, model.embed(TEXTS), rtol=0, atol=2e-6)
        unscaled = edgeinfer("embed", encoder, TEXTS[1], "--pooling", "last", "--no-normalize").out
        expected = model.embed(TEXTS[1], pooling="last", normalize=False)
        np.testing.assert_allclose(json.loads(unscaled), expected, rtol=1e-5, atol=1e-5)
        assert np.linalg.norm(expected) > 1.01


def test_files_and_arguments_are_texts_of_one_json_object(
    edgeinfer: CommandLine, encoder: str, tmp_path: Path
) -> None:
    file = tmp_path / "text.txt"
    file.write_text("cat\ncat", encoding="utf-8")
    record = json.loads(edgeinfer("embed", encoder, "cat", "--text", str(file), "--json").out)
    assert (record["model"], record["dimensions"], len(record["embeddings"])) == ("bert", 64, 2)
    with library.load(encoder, draft=None) as model:
        assert record["tokens"] == model.text_vectors(["cat", "cat\ncat"]).tokens


def test_similarities_are_cosines_also_of_unscaled_vectors(edgeinfer: CommandLine, encoder: str) -> None:
    outcome = edgeinfer("embed", encoder, *TEXTS[:2], "--similarity", "--no-normalize")
    head, *rows = outcome.out.splitlines()
    assert head.split() == ["0", "1", "TEXT"]
    with library.load(encoder, draft=None) as model:
        first, second = model.embed(TEXTS[:2])
    cosine = f"{first @ second:.4f}"
    assert [row.split()[:3] for row in rows] == [["0", "1.0000", cosine], ["1", cosine, "1.0000"]]
    assert [row.split(maxsplit=3)[3] for row in rows] == TEXTS[:2]


def test_rank_prints_the_most_relevant_texts_first(edgeinfer: CommandLine, tmp_path: Path) -> None:
    path = str(encoder_of("bert-reranker", "plain").write(tmp_path / "reranker.gguf"))
    with library.load(path, draft=None) as model:
        expected = model.rank("fox", TEXTS)
    record = json.loads(edgeinfer("rank", path, "fox", *TEXTS, "--json").out)
    assert [one["index"] for one in record["results"]] == [one.index for one in expected]
    assert record["results"][0]["score"] == pytest.approx(expected[0].score, abs=1e-5)
    head, *rows = edgeinfer("rank", path, "fox", *TEXTS, "--top", "2").out.splitlines()
    assert head.split() == ["SCORE", "INDEX", "TEXT"]
    assert [row.split(maxsplit=2)[2] for row in rows] == [one.text for one in expected[:2]]


def test_text_of_users_cannot_control_the_terminal(edgeinfer: CommandLine, fake: FakeModel) -> None:
    text = "a\x1b]0;title\x07b"
    for outcome in (edgeinfer("rank", "tiny", "q", text), edgeinfer("embed", "tiny", text, "--similarity")):
        assert outcome.code == 0
        assert "a\\x1b]0;title\\x07b" in outcome.out
    assert fake.prompts == ["q", text, text]
    assert fake.closed


def test_what_is_no_text_is_refused_before_the_model_is_loaded(
    edgeinfer: CommandLine, fake: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n \n")))
    for arguments, message in (
        (("embed", "tiny"), "no text: standard input is empty"),
        (("embed", "tiny", "a", ""), "saw an empty text, wanted texts with at least one character"),
        (("embed", "tiny", "a", "--similarity", "--json"), "--similarity and --json exclude each other"),
        (("embed", "tiny", "a", "--pooling", "sum"), "--pooling: saw 'sum', wanted one of mean, cls, last"),
        (("rank", "tiny", "a", "b", "--top", "0"), "--top: saw '0', wanted a whole number of at least 1"),
        (("rank", "tiny"), "Missing argument 'query'"),
    ):
        outcome = edgeinfer(*arguments)
        assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
        assert message in outcome.err
    assert fake.loaded_with == {}


def test_a_model_that_cannot_rank_is_refused_in_one_line(edgeinfer: CommandLine) -> None:
    outcome = edgeinfer("rank", "tiny", "q", "a")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("edgeinfer: rank: tiny is no reranker")
    missing = edgeinfer("embed", "no-such-model", "a")
    assert (missing.code, missing.err.count("\n")) == (1, 1)
