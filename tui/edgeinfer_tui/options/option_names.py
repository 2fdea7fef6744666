"""Other names of options, as llama.cpp has them."""

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
"""Other names of options, as llama.cpp has them -> the name that help shows. They hold in every command."""


def canonical(name: str) -> str:
    """The name of an option that help shows, for one of its names."""
    return ALIASES.get(name, name)


def canonical_flag(flag: str) -> str:
    return f"--{canonical(flag[2:])}" if flag.startswith("--") else flag
