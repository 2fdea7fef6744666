"""Special tokens: by key, by default, by text."""

from typing import Any

import numpy as np
import pytest

from edgeinfer.tokenizer import Tokenizer, TokenType

NORMAL, CONTROL = TokenType.NORMAL, TokenType.CONTROL


def tokenizer_with(*texts: str, **keys: Any) -> Tokenizer:
    """Return a byte-pair tokenizer whose tokens are `texts`, all normal."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": keys.pop("pre", "default"),
        "tokenizer.ggml.tokens": list(texts),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": np.full(len(texts), NORMAL),
    }
    return Tokenizer.from_metadata(metadata | {f"tokenizer.ggml.{key}": value for key, value in keys.items()})


def test_sentence_pieces_have_default_ids(sentence_pieces: Any) -> None:
    tokenizer = Tokenizer.from_metadata(sentence_pieces.metadata)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id, tokenizer.pad_id) == (1, 2, 0, None)


def test_byte_pairs_default_to_token_eleven_for_bos_and_eos() -> None:
    many = tokenizer_with(*(f"t{index}" for index in range(12)))
    small = tokenizer_with("a", "b")
    assert (many.bos_id, many.eos_id) == (11, 11)
    assert (small.bos_id, small.eos_id) == (None, None)
    assert small.encode("ab", bos=True) == [0, 1]


def test_chatglm_has_no_default_bos() -> None:
    texts = [f"t{index}" for index in range(12)]
    assert tokenizer_with(*texts, pre="chatglm-bpe").bos_id is None
    assert tokenizer_with(*texts, pre="glm4", bos_token_id=3).bos_id == 3


def test_a_key_beyond_the_vocabulary_is_ignored() -> None:
    assert tokenizer_with("a", "b", eos_token_id=7).eos_id is None
    assert tokenizer_with("a", "b", eos_token_id=1).eos_id == 1


def test_llama_3_adds_bos_unless_the_file_disables_it() -> None:
    assert tokenizer_with("a", pre="llama-bpe").add_bos
    assert not tokenizer_with("a", pre="llama-bpe", add_bos_token=False).add_bos
    assert not tokenizer_with("a", pre="qwen2").add_bos


def test_gemma_4_always_adds_bos() -> None:
    assert tokenizer_with("a", pre="gemma4", add_bos_token=False).add_bos


def test_end_of_turn_is_recognized_by_its_text_and_becomes_a_control_token() -> None:
    tokenizer = tokenizer_with("a", "<|im_end|>", "<|eom_id|>", "<|endoftext|>")
    assert (tokenizer.eot_id, tokenizer.eom_id) == (1, 2)
    assert [tokenizer.token_type(token) for token in range(4)] == [NORMAL, CONTROL, CONTROL, CONTROL]
    assert tokenizer.end_ids == {1, 2, 3}


def test_a_key_overrides_a_text() -> None:
    assert tokenizer_with("a", "<|im_end|>", "b", eot_token_id=2).eot_id == 2


def test_named_tokens_end_a_completion() -> None:
    assert tokenizer_with("a", "b", "c", eos_token_id=0, eot_token_id=1, eom_token_id=2).end_ids == {0, 1, 2}


def test_fill_in_the_middle_is_recognized_by_key_by_old_key_and_by_text() -> None:
    by_key = tokenizer_with(
        "a", "b", "c", fim_pre_token_id=0, suffix_token_id=1, fim_sep_token_id=2
    ).special_ids
    assert (by_key.fim_prefix, by_key.fim_suffix, by_key.fim_separator) == (0, 1, 2)
    by_text = tokenizer_with("<|fim_prefix|>", "<fim_suffix>", "<MID>", "<|fim_pad|>", "<|repo_name|>")
    result = by_text.special_ids
    assert (result.fim_prefix, result.fim_suffix, result.fim_middle) == (0, 1, 2)
    assert by_text.end_ids == {3, 4}


def test_an_end_of_message_inside_a_response_does_not_end_it() -> None:
    harmony = tokenizer_with("<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|start|>")
    assert harmony.end_ids == {1, 2}
    assert harmony.token_type(0) == harmony.token_type(3) == TokenType.USER_DEFINED
    assert tokenizer_with("<|end|>", "<|return|>").end_ids == {0, 1}


def test_the_token_s_is_text_if_the_model_has_another_eos() -> None:
    assert tokenizer_with("</s>", "<|tool_response>").end_ids == {1}
    assert tokenizer_with("</s>", "<|tool_response>").token_type(0) == NORMAL
    assert tokenizer_with("</s>", "a").end_ids == {0}


@pytest.mark.parametrize("empty", [0, 1])
def test_tokens_without_text_keep_distinct_ids(empty: int) -> None:
    texts = ["", ""]
    texts[empty] = "a"
    tokenizer = tokenizer_with(*texts)
    assert tokenizer.vocabulary_size == 2
    assert tokenizer.encode("a") == [empty]
