"""The special tokens and chat templates of a folder in GGUF metadata."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeinfer.hugging_face.json_files import optional_json
from edgeinfer.hugging_face.tokenizer.vocabulary import PREFIX

ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
    "mask_token": "mask_token_id",
}
TEMPLATE = "tokenizer.chat_template"


def special_metadata(
    folder: Path, config: Mapping[str, Any], tokenizer: Mapping[str, Any], texts: list[str]
) -> dict[str, Any]:
    """The roles of tokens, whether BOS and EOS are added, and the chat templates."""
    settings = optional_json(folder, "tokenizer_config.json")
    generation = optional_json(folder, "generation_config.json")
    ids = {text: index for index, text in enumerate(texts)}
    found: dict[str, Any] = {}
    for role, key in ROLES.items():
        index = ids.get(_text(settings.get(role)))
        if index is None:
            index = _first_id(config.get(f"{role}_id"), len(texts))
        if index is not None:
            found[PREFIX + key] = index
    ends = _all_ids(generation.get("eos_token_id", config.get("eos_token_id")), len(texts))
    others = [index for index in ends if index != found.get(f"{PREFIX}eos_token_id")]
    if others:
        found[f"{PREFIX}eot_token_id"] = others[0]
    for name, role in (("add_bos_token", "bos"), ("add_eos_token", "eos")):
        given, index = settings.get(name), found.get(f"{PREFIX}{role}_token_id")
        is_added = _is_added(tokenizer.get("post_processor"), texts, index, first=role == "bos")
        found[PREFIX + name] = given if isinstance(given, bool) and not is_added else is_added
    return found | _templates(folder, settings)


def _text(token: Any) -> str:
    """The text of a special token in tokenizer_config.json; "": there is none."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else ""


def _all_ids(given: Any, count: int) -> list[int]:
    values = given if isinstance(given, list) else [given]
    return [value for value in values if type(value) is int and 0 <= value < count]


def _first_id(given: Any, count: int) -> int | None:
    return next(iter(_all_ids(given, count)), None)


def _is_added(processor: Any, texts: list[str], index: int | None, *, first: bool) -> bool:
    """Whether a post-processor puts a token before a text, or after it."""
    if not isinstance(processor, Mapping) or index is None:
        return False
    if processor.get("type") == "Sequence":
        parts = processor.get("processors") or ()
        return any(_is_added(part, texts, index, first=first) for part in parts)
    single = processor.get("single")
    if processor.get("type") != "TemplateProcessing" or not isinstance(single, list) or not single:
        return False
    token = single[0 if first else -1].get("SpecialToken")
    return isinstance(token, Mapping) and token.get("id") == texts[index]


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates, by metadata key."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {TEMPLATE: path.read_text(encoding="utf-8", errors="replace")}
    given = settings.get("chat_template") or optional_json(folder, "chat_template.json").get("chat_template")
    if isinstance(given, str):
        return {TEMPLATE: given}
    named: dict[str, str] = {
        str(each.get("name")): each["template"]
        for each in (given if isinstance(given, list) else ())
        if isinstance(each, Mapping) and isinstance(each.get("template"), str)
    }
    default = named.pop("default", None)
    found = {f"{TEMPLATE}.{name}": text for name, text in named.items()}
    return found if default is None else {TEMPLATE: default, **found}
