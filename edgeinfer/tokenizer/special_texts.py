"""Well-known texts of special tokens, for files that don't define all of them.

Source: llama.cpp, `llama-vocab.cpp`, which uses the same texts. If a file contains several, the first of the
list is used.
"""

END_OF_TURN = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
)
END_OF_MESSAGE = ("<|eom_id|>",)
FIM_PREFIX = (
    "<|fim_prefix|>",
    "<fim-prefix>",
    "<fim_prefix>",
    "<｜fim▁begin｜>",
    "<PRE>",
    "▁<PRE>",
    "<|code_prefix|>",
    "<|prefix|>",
)
FIM_SUFFIX = (
    "<|fim_suffix|>",
    "<fim-suffix>",
    "<fim_suffix>",
    "<｜fim▁hole｜>",
    "<SUF>",
    "▁<SUF>",
    "<|code_suffix|>",
    "<|suffix|>",
)
FIM_MIDDLE = (
    "<|fim_middle|>",
    "<fim-middle>",
    "<fim_middle>",
    "<｜fim▁end｜>",
    "<MID>",
    "▁<MID>",
    "<|code_middle|>",
    "<|middle|>",
)
FIM_PAD = ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")
FIM_REPOSITORY = ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")
FIM_SEPARATOR = ("<|file_sep|>",)

END_OF_GENERATION = (
    *END_OF_TURN,
    *END_OF_MESSAGE,
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "</s>",
    "[EOS]",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "[e~[",
)
"""Tokens that always end generation."""

ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""Marks inside a response (gpt-oss) that clients need: user-defined, not control tokens."""

HARMONY_ENDS = tuple({end, call} for end in ("<|return|>", "<|flush|>") for call in ("<|call|>", "<|calls|>"))
"""If a file has all tokens of one set, they end generation, and `<|end|>` only ends a part of it."""

PLAIN_S_MARKERS = ("<|tool_response>", "<|plamo:eos|>")
"""If one of these ends generation, `</s>` is ordinary text (Gemma 4, PLaMo)."""
