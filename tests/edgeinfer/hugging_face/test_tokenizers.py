"""Tokenizers of folders encode texts as the library of Hugging Face does."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.hugging_face.tokenizer.pre_tokenizer_names import pre_tokenizer_name
from edgeinfer.hugging_face.tokenizer.special_tokens import special_metadata
from edgeinfer.hugging_face.tokenizer.vocabulary import vocabulary_metadata
from edgeinfer.tokenizer import Tokenizer as OwnTokenizer

TEXTS = [
    "The quick brown fox jumps over 12345 lazy dogs.",
    "  two  spaces\n\nand   lines\t\n",
    "Ünïcödé 東京 ẞ ?!?",
]
SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def byte_level(*splits: Any, use_regex: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    stages = [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(stages) if splits else stages[0]
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def split(regex: str) -> Any:
    return pre_tokenizers.Split(Regex(regex), "isolated", False)


BYTE_LEVEL = {
    "gpt-2": lambda: byte_level(use_regex=True),
    "starcoder": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True),
    "dbrx": lambda: byte_level(split(LLAMA3), use_regex=False),
    "qwen2": lambda: byte_level(split(QWEN2), use_regex=False),
}


def own(folder: Path, tokenizer: Tokenizer, **config: Any) -> OwnTokenizer:
    """The tokenizer of a folder with this tokenizer.json."""
    given = json.loads(tokenizer.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    rows = tokenizer.get_vocab_size() + 3
    metadata = vocabulary_metadata(folder, given, rows)
    special = special_metadata(folder, {}, given, metadata["tokenizer.ggml.tokens"])
    return OwnTokenizer.from_metadata(metadata | special)


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_byte_level_tokenizers_are_found_by_their_regex_and_encode_alike(tmp_path: Path, name: str) -> None:
    tokenizer = BYTE_LEVEL[name]()
    assert pre_tokenizer_name(json.loads(tokenizer.to_str())) == name
    mine = own(tmp_path, tokenizer)
    for text in TEXTS:
        assert mine.encode(text, bos=False) == tokenizer.encode(text, add_special_tokens=False).ids


def sentence_piece(prefix: bool) -> Tokenizer:
    """A BPE of SentencePiece, as the tokenizers of Llama 2 (with a prefix) and Gemma."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Prepend("▁")] if prefix else []
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=specials, show_progress=False)
    trained.train_from_iterator([text.replace("東京", "") for text in TEXTS] * 3, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer.model = models.BPE(model["vocab"], merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer.normalizer = trained.normalizer
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece_tokenizers_encode_alike(tmp_path: Path, prefix: bool) -> None:
    tokenizer = sentence_piece(prefix)
    mine = own(tmp_path, tokenizer)
    for text in TEXTS:
        assert mine.encode(text, bos=False) == tokenizer.encode(text, add_special_tokens=False).ids


def test_unigram_tokenizers_encode_alike(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 5, trainer)
    mine = own(tmp_path, tokenizer)
    for text in ("the quick fox", "over lazy dogs", "brown"):
        assert mine.encode(text, bos=False) == tokenizer.encode(text, add_special_tokens=False).ids


def test_roles_and_templates_come_from_the_files_of_the_folder(tmp_path: Path) -> None:
    tokenizer = byte_level(use_regex=True)
    bos, eos = (tokenizer.token_to_id(text) for text in ("<s>", "</s>"))
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", bos)])
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos, 7]}))
    given = json.loads(tokenizer.to_str())
    texts = vocabulary_metadata(tmp_path, given, tokenizer.get_vocab_size())["tokenizer.ggml.tokens"]
    found = special_metadata(tmp_path, {}, given, texts)
    assert found["tokenizer.ggml.bos_token_id"] == bos
    assert found["tokenizer.ggml.eos_token_id"] == eos
    assert found["tokenizer.ggml.eot_token_id"] == 7
    assert (found["tokenizer.ggml.add_bos_token"], found["tokenizer.ggml.add_eos_token"]) == (True, False)
    assert found["tokenizer.chat_template"] == "{{ messages }}"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}")
    assert special_metadata(tmp_path, {}, given, texts)["tokenizer.chat_template"] == "{{ bos_token }}"


def test_named_templates_are_kept(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    found = special_metadata(tmp_path, {}, {}, ["a"])
    assert (found["tokenizer.chat_template"], found["tokenizer.chat_template.tool_use"]) == ("A", "B")


def _changed(change: dict[str, Any]) -> dict[str, Any]:
    return {**json.loads(byte_level(use_regex=True).to_str()), **change}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "no model, wanted a tokenizer"),
    ({"model": {"type": "WordPiece"}}, "model 'WordPiece', wanted BPE or Unigram"),
    ({"model": {"type": "BPE", "vocab": [1]}}, "no vocab, wanted token ids by text"),
    (
        {"model": {"type": "BPE", "vocab": {"a": 9999}}},
        "token 'a' has id 9999, wanted 0 to 399, a row of the",
    ),
    ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b c"]}}, "merge 'a b c', wanted two tokens"),
    ({"pre_tokenizer": {"type": "Whitespace"}}, 'unknown pre-tokenizer \'{"type": "Whitespace"}\''),
    ({"normalizer": {"type": "Lowercase"}}, "normalizer 'Lowercase', wanted none or NFC"),
    ({"model": {"type": "Unigram", "vocab": 3}}, "no vocab, wanted pairs of token and score"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_other_tokenizers_are_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        vocabulary_metadata(tmp_path, _changed(change), 400)
    assert str(caught.value).startswith(f"{tmp_path}: tokenizer.json: {message}")
