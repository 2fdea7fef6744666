"""The encoders: plain text, without special tokens, to token ids; one for each kind of tokenizer."""
