"""The llama.cpp engine: llama.cpp computes, edgeinfer samples, and no log output reaches the terminal."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.chat_templates.special_text_guard import SpecialTextGuard
from edgeinfer.errors import EdgeInferError, UnsupportedModelError
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_quant_formats import GGUFFile, GGUFWriter
from tests.edgeinfer.conftest import ZooFile
from tests.model_zoo import ZOO
from tests.random_models import vocabulary_metadata

pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.llama_cpp
PROMPT = "the rain on"


@pytest.fixture(scope="module")
def theirs(zoo_file: ZooFile) -> Iterator[Model]:
    with edgeinfer.load(zoo_file("llama"), engine="llama.cpp", threads=1, kv="f32") as model:
        yield model


@pytest.fixture(scope="module")
def ours(zoo_file: ZooFile) -> Iterator[Model]:
    with edgeinfer.load(zoo_file("llama"), threads=2, kv="f32") as model:
        yield model


@pytest.mark.parametrize("kv", ["q8_0", "q4_0", "q8_0/q4_0"])
def test_a_quantized_cache_is_accepted(kv: CacheType) -> None:
    with edgeinfer.load("tiny", engine="llama.cpp", threads=1, context=64, kv=kv) as model:
        assert model.generate("Once", max_tokens=3, temperature=0.0).text == " upon a time"


def test_recent_positions_in_f16_are_refused() -> None:
    with pytest.raises(EdgeInferError, match=r"kv: llama.cpp has no q4_0\+f16; take q4_0/q4_0"):
        edgeinfer.load("tiny", engine="llama.cpp", kv="q4_0+f16")


def write_mamba(path: Path) -> Path:
    """A random recurrent model, which llama.cpp can't rewind."""
    width, inner, state, rank, kernel, layers = 32, 64, 8, 4, 4, 2
    sizes = {"ssm.conv_kernel": kernel, "ssm.inner_size": inner, "ssm.state_size": state}
    own = {
        "block_count": layers,
        "embedding_length": width,
        "context_length": 200,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "ssm.time_step_rank": rank,
        **sizes,
    }
    metadata = {"general.architecture": "mamba", **{f"mamba.{key}": value for key, value in own.items()}}
    shapes = {
        "attn_norm.weight": (width,),
        "ssm_in.weight": (2 * inner, width),
        "ssm_conv1d.weight": (inner, kernel),
        "ssm_conv1d.bias": (inner,),
        "ssm_x.weight": (rank + 2 * state, inner),
        "ssm_dt.weight": (inner, rank),
        "ssm_dt.bias": (inner,),
        "ssm_a": (inner, state),
        "ssm_d": (inner,),
        "ssm_out.weight": (width, inner),
    }
    random = np.random.default_rng(9)
    with GGUFWriter(path, {**metadata, **vocabulary_metadata()}) as writer:
        tensors = {"token_embd.weight": (288, width), "output_norm.weight": (width,)}
        tensors |= {f"blk.{layer}.{name}": shape for layer in range(layers) for name, shape in shapes.items()}
        for name, shape in tensors.items():
            values = random.standard_normal(shape).astype(np.float32)
            if name.endswith("ssm_a"):
                values = -np.abs(values)
            writer.add_tensor(name, values if len(shape) == 1 else values / np.sqrt(shape[-1]), "F32")
    return path


def test_it_streams_the_tokens_of_the_native_engine(theirs: Model, ours: Model) -> None:
    settings: dict[str, Any] = {"max_tokens": 16, "logprobs": 0}
    completions = [model.generate(PROMPT, temperature=0.0, **settings) for model in (theirs, ours)]
    assert completions[0].ids == completions[1].ids
    assert completions[0].text == completions[1].text
    assert completions[0].prompt_ids == completions[1].prompt_ids
    streamed = [token.text for token in theirs.stream(PROMPT, temperature=0.0, max_tokens=16)]
    assert "".join(streamed) == completions[0].text


def test_a_seed_samples_the_same_tokens_on_both_engines(theirs: Model, ours: Model) -> None:
    seeded_logits = [model.generate(PROMPT, max_tokens=16, seed=5).ids for model in (theirs, theirs, ours)]
    assert seeded_logits[0] == seeded_logits[1] == seeded_logits[2]
    assert theirs.generate(PROMPT, max_tokens=16, seed=6).ids != seeded_logits[0]


def test_logits_are_those_of_the_native_engine(theirs: Model, ours: Model) -> None:
    ids = np.random.default_rng(1).integers(3, 250, 40).tolist()
    actual, expected = theirs.logits(ids), ours.logits(ids)
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual - expected) < 1e-5 * np.linalg.norm(expected)
    assert np.array_equal(theirs.logits(ids), actual)


def test_chats_keep_their_cache(theirs: Model, ours: Model) -> None:
    completions = []
    for model in (theirs, ours):
        chat = model.chat(system="he", temperature=0.0, max_tokens=8)
        completions.append([chat.say("the rain"), chat.say("the wind")])
    assert [a.ids for a in completions[0]] == [a.ids for a in completions[1]]
    assert completions[0][1].speed.cached_tokens == completions[1][1].speed.cached_tokens > 10


def test_rewinding_drops_later_tokens(theirs: Model) -> None:
    engine = theirs.engine
    engine.rewind(0)
    expected = engine.append([1, 50, 60])
    engine.append([70, 80])
    engine.rewind(2)
    assert engine.ids == [1, 50]
    assert np.allclose(engine.append([60]), expected, atol=1e-4)


def test_its_tokenizer_equals_the_native_one(theirs: Model, ours: Model) -> None:
    for text in ("", " the rain", "he<s>", "ñ 😀", "the</s> the rain"):
        for special in (False, True):
            ids = theirs.tokenizer.encode(text, bos=True, special=special)
            assert ids == ours.tokenizer.encode(text, bos=True, special=special)
            for shown in (False, True):
                assert theirs.tokenizer.decode(ids, special=shown) == ours.tokenizer.decode(
                    ids, special=shown
                )
    assert theirs.tokenizer.bos_id == ours.tokenizer.bos_id
    assert theirs.tokenizer.end_ids == ours.tokenizer.end_ids


def test_its_tokenizer_keeps_control_text_as_text(theirs: Model, ours: Model) -> None:
    hidden = SpecialTextGuard(ours.tokenizer.control_texts).placeholders()
    assert set(theirs.tokenizer.control_texts) == set(ours.tokenizer.control_texts)
    text = f"<s>he {hidden.hide('the</s> rain<s>')}</s> the"
    ids = [m.tokenizer.encode(text, special=True, restore=hidden.restore) for m in (theirs, ours)]
    assert ids[0] == ids[1]
    assert sum(ours.tokenizer.is_control(token) for token in ids[0]) == 2
    plain = [
        m.tokenizer.encode("<s>he", bos=True, special=True, restore=hidden.restore) for m in (theirs, ours)
    ]
    assert plain[0] == plain[1]


def test_a_lone_surrogate_is_no_crash(theirs: Model) -> None:
    assert theirs.generate("a\ud800b", max_tokens=1).ids


def test_the_context_is_the_requested_or_the_trained_one(theirs: Model, zoo_file: ZooFile) -> None:
    assert theirs.context == 256
    with edgeinfer.load(zoo_file("llama"), engine="llama.cpp", context=30, threads=1) as small:
        assert small.context == 30
        with pytest.raises(EdgeInferError, match=r"has 40 tokens, the context holds 30; .* up to 256"):
            small.generate([5] * 40)


def write_deci(path: Path, llama: Path) -> Path:
    """A file of an architecture that edgeinfer doesn't run, with the tensors of a llama."""
    with GGUFFile.open(llama) as file:
        own = {key.replace("llama.", "deci."): value for key, value in file.metadata.items()}
        with GGUFWriter(path, {**own, "general.architecture": "deci"}) as writer:
            for name in file.tensors:
                writer.add_tensor(name, file.decode(name), "F32")
    return path


def test_an_unknown_architecture_names_the_llama_cpp_engine_which_loads_it(
    tmp_path: Path, zoo_file: ZooFile
) -> None:
    path = write_deci(tmp_path / "deci.gguf", zoo_file("llama"))
    with pytest.raises(UnsupportedModelError, match=r"architecture deci isn't .* add engine='llama\.cpp'"):
        edgeinfer.load(path)
    with edgeinfer.load(path, engine="llama.cpp", threads=1) as model:
        assert model.context == 256
        assert len(model.generate(PROMPT, max_tokens=8, seed=1).ids) > 0


def test_a_recurrent_model_prefills_again_if_it_cannot_rewind(tmp_path: Path) -> None:
    with edgeinfer.load(write_mamba(tmp_path / "mamba.gguf"), engine="llama.cpp", threads=1) as model:
        once = model.generate(PROMPT, max_tokens=10, temperature=0.0)
        assert model.generate(PROMPT, max_tokens=10, temperature=0.0).ids == once.ids
        ids = [*once.prompt_ids, *once.ids]
        logits = model.logits(ids)
        engine = model.engine
        engine.rewind(len(ids) - 3)
        assert engine.ids == ids[:-3]
        assert np.allclose(engine.append(ids[-3:]), logits[-1], atol=1e-3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ((b"output_norm.weight", b"output_nrom.weight"), "tensor 'output_norm.weight' not found"),
        ((b"GGUF", b"GGOF"), "invalid magic characters"),
    ],
)
def test_a_refused_file_gives_a_one_line_error_with_the_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: tuple[bytes, bytes], message: str
) -> None:
    path = ZOO["llama"].write(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(*damage, 1))
    with pytest.raises(UnsupportedModelError) as caught:
        edgeinfer.load(path, engine="llama.cpp", threads=1)
    assert str(caught.value).startswith("model.gguf: llama.cpp can't load it (")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_its_log_output_is_suppressed(zoo_file: ZooFile, name: str) -> None:
    program = (
        "import edgeinfer, sys\n"
        "model = edgeinfer.load(sys.argv[1], engine='llama.cpp', context=1000, threads=1)\n"
        "assert model.generate('the rain', max_tokens=3).ids\n"
        "assert model.chat().say('the rain', max_tokens=3).ids\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(zoo_file(name))], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_closed_model_raises_an_error(zoo_file: ZooFile) -> None:
    with edgeinfer.load(zoo_file("llama"), engine="llama.cpp", threads=1) as model:
        stream = model.stream(PROMPT)
        next(stream)
    with pytest.raises(EdgeInferError, match="the model has been closed; load it again"):
        list(stream)


@pytest.mark.anyio
async def test_the_server_completes_with_llama_cpp(theirs: Model) -> None:
    pytest.importorskip("httpx")
    from tests.edgeinfer.serving.http_client import post

    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}
    response = await post(theirs, "/v1/completions", {**body, "n": 2})
    assert response.status_code == 200
    expected = theirs.generate(PROMPT, max_tokens=5, temperature=0.0).text
    assert [choice["text"] for choice in response.json()["choices"]] == [expected, expected]
    refused = await post(theirs, "/v1/embeddings", {"input": PROMPT})
    assert refused.status_code == 400
    assert "the engine llama.cpp doesn't support" in refused.json()["error"]["message"]
