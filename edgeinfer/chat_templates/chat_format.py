"""Renders a chat to the model's prompt format with the model's chat template."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self

from edgeinfer.engine.protocols import TextTokenizer
from edgeinfer.errors import ChatTemplateError

if TYPE_CHECKING:
    from edgeinfer.chat_templates.chat_template import ChatTemplate

_KEY = "tokenizer.chat_template"
_OTHER_SPECIAL = {
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
    "mask_token": "mask",
}
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")

Message = Mapping[str, Any]


class ChatFormat:
    """A chat template and the texts of the special tokens that it writes.

    The rendered text contains special tokens by name: encode it with `special=True`, and with `bos=True` only
    if it doesn't begin with the text of BOS.

    Source: Hugging Face transformers, `apply_chat_template`, whose output this one matches.
    """

    def __init__(
        self,
        template_source: str | None,
        bos_text: str | None = None,
        eos_text: str | None = None,
        *,
        special_texts: Mapping[str, str] | None = None,
        tool_template_source: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Store the template; it is compiled on first use.

        `special_texts`: further variables of templates (`pad_token`, ...); `tool_template_source`: the
        template that the file uses with tools; `now`: the clock of `strftime_now`.
        """
        self.template_source = template_source
        self._tool_source = template_source if tool_template_source is None else tool_template_source
        self._templates: dict[str, ChatTemplate] = {}
        texts = {"bos_token": bos_text, "eos_token": eos_text, **(special_texts or {})}
        self._special_texts = {name: text for name, text in texts.items() if text is not None}
        self._now = now

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], tokenizer: TextTokenizer, name: str | None = None
    ) -> Self:
        """Take the template of a GGUF file; `name` selects one of its named templates.

        For a file without a template, `render` raises.

        Raises:
            ChatTemplateError: the file has no template of that name.
        """
        prefix = _KEY + "."
        named = {key.removeprefix(prefix): text for key, text in metadata.items() if key.startswith(prefix)}
        source = metadata.get(_KEY, named.get("default"))
        tool_source = named.get("tool_use")
        if name is not None:
            if name not in named and not (name == "default" and source is not None):
                known = ", ".join(sorted({*named, *(["default"] if source else [])})) or "none"
                raise ChatTemplateError(f"{prefix}{name} is missing; the file's templates: {known}")
            source, tool_source = named.get(name, source), None
        for template in (source, tool_source):
            if template is not None and not isinstance(template, str):
                raise ChatTemplateError(
                    f"{_KEY}: saw a value of type {type(template).__name__}, wanted a text; give a Jinja "
                    "template (chat_template=)"
                )
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        ids |= {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _OTHER_SPECIAL.items()}
        size = tokenizer.vocabulary_size
        texts = {
            name: tokenizer.token_bytes(int(token)).decode("utf-8", "replace")
            for name, token in ids.items()
            if isinstance(token, int) and not isinstance(token, bool) and 0 <= token < size
        }
        return cls(source, special_texts=texts, tool_template_source=tool_source)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of a chat; with `add_generation_prompt` it ends with the assistant's header.

        `messages` have "role" and "content"; `tools` are JSON schemas; `variables` are passed to the template
        (`enable_thinking`, ...) and override the special tokens.

        Raises:
            ChatTemplateError: there is no template, or it fails; the text gives the line.
        """
        values: dict[str, Any] = {
            **self._special_texts,
            "messages": [_with_reasoning(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        return self._template(tools is not None).render(values)

    def variables(self, with_tools: bool = False) -> frozenset[str]:
        """The variables that the template reads, with tools or without. Raises `ChatTemplateError`."""
        return self._template(with_tools).variables

    def _template(self, with_tools: bool) -> "ChatTemplate":
        source = self._tool_source if with_tools else self.template_source
        if source is None:
            raise ChatTemplateError(
                f"{_KEY} is missing: the file has no chat template. Give a Jinja template (chat_template=)"
            )
        if source not in self._templates:
            from edgeinfer.chat_templates.chat_template import ChatTemplate  # imports Jinja

            self._templates[source] = ChatTemplate(source, self._now)
        return self._templates[source]


def _with_reasoning(message: Message) -> Message:
    """Return the message with its reasoning under both names that templates use."""
    reasoning = next((message[key] for key in _REASONING_KEYS if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
