"""Well-known texts of special tokens, for files that don't say which token plays which part.

Source: llama.cpp, `llama-vocab.cpp`, which finds them by the same texts. Where a file holds
several, the first of the list is taken.
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
"""Tokens that end an answer, whatever else the file says."""

ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""Marks inside an answer (gpt-oss) that a reader of the answer needs: user-defined, not control."""

THOUGHT_MARKS = frozenset(
    {
        *("<think>", "</think>", "<thinking>", "</thinking>", "<thought>", "</thought>"),
        *("<reasoning>", "</reasoning>", "<seed:think>", "</seed:think>", "[THINK]", "[/THINK]"),
        *("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
    }
)
"""What tells a thought from an answer: shown even where a file calls them control tokens."""
HARMONY_ENDS = tuple({end, call} for end in ("<|return|>", "<|flush|>") for call in ("<|call|>", "<|calls|>"))
"""Where all of one set end an answer, `<|end|>` only ends a part of it."""

PLAIN_S_MARKERS = ("<|tool_response>", "<|plamo:eos|>")
"""Where one of these ends an answer, `</s>` is an ordinary text (Gemma 4, PLaMo)."""
