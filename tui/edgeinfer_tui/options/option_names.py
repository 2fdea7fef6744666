"""Aliases of options, as in llama.cpp."""

ALIASES = {
    "api-key": "key",
    "ctx-size": "context",
    "generate-tokens": "max-tokens",
    "grammar-file": "grammar",
    "json-schema-file": "json-schema",
    "mirostat-ent": "mirostat-tau",
    "mirostat-lr": "mirostat-eta",
    "n-depth": "depth",
    "n-gen": "max-tokens",
    "n-predict": "max-tokens",
    "n-prompt": "prompt-tokens",
    "predict": "max-tokens",
    "system-prompt": "system",
    "temp": "temperature",
    "typical": "typical-p",
}
"""Alias, as in llama.cpp -> the name shown in help. They work in every command."""


def canonical(name: str) -> str:
    """The name shown in help for any name of an option."""
    return ALIASES.get(name, name)


def canonical_flag(flag: str) -> str:
    return f"--{canonical(flag[2:])}" if flag.startswith("--") else flag
