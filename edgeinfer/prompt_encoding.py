"""Prompts to token ids: texts, given ids, and messages through the chat template."""

import operator
from collections.abc import Sequence
from functools import cached_property

from edgeinfer.chat import Message
from edgeinfer.chat_templates.chat_format import ChatFormat
from edgeinfer.chat_templates.reasoning import parted, with_closed_reasoning, without_reasoning
from edgeinfer.chat_templates.special_text_guard import SpecialTextGuard
from edgeinfer.chat_templates.template_options import TemplateOptions
from edgeinfer.chat_templates.tool_calls import Tool, check_tools
from edgeinfer.engine.protocols import TextTokenizer
from edgeinfer.errors import SettingError, shown
from edgeinfer.generation.request import Prompt, messages_of


class PromptEncoding:
    """Prompt encoding of one model; `name`: the model's name for errors; `defaults`: default template
    options.
    """

    def __init__(
        self,
        name: str,
        tokenizer: TextTokenizer,
        chat_format: ChatFormat | None,
        vocabulary_size: int,
        defaults: TemplateOptions,
    ) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._chat_format = chat_format
        self._vocabulary_size = vocabulary_size
        self._defaults = defaults
        self._variables(defaults)

    @cached_property
    def _guard(self) -> SpecialTextGuard:
        return SpecialTextGuard(self._tokenizer.control_texts)

    def of_prompt(self, prompt: Prompt, raw: bool, options: TemplateOptions) -> list[int]:
        """Token ids of any prompt type of `generate`; `raw` as there.

        Raises:
            SettingError: an invalid type, or one that the model doesn't support.
        """
        if not isinstance(raw, bool):
            raise SettingError(f"raw: saw {shown(raw)}, wanted True or False")
        messages = messages_of(prompt)
        if messages is None and options.tools:
            raise SettingError(
                "tools: wanted the messages of a chat as prompt, because the chat template writes the tools"
            )
        if messages is not None:
            return self.of_messages(messages, options)
        templated = isinstance(prompt, str) and not raw
        if not templated and (options.thinking or options.args):
            name = "thinking" if options.thinking else "template_args"
            raise SettingError(f"{name}: the chat template isn't applied to the prompt (raw=False does that)")
        if not isinstance(prompt, str):
            return self.of_ids(prompt)  # type: ignore[arg-type]
        if raw:
            return self.of_text(prompt)
        return self.of_messages([{"role": "user", "content": prompt}], options)

    def of_ids(self, ids: Sequence[int], name: str = "prompt") -> list[int]:
        """The ids unchanged. Raises `SettingError` with `name` if one is not in the vocabulary."""
        size = self._vocabulary_size
        expected = "a text or whole numbers" if name == "prompt" else "whole numbers"
        try:
            if isinstance(ids, bytes | bytearray):
                raise TypeError
            taken = [operator.index(i) for i in ids]
        except TypeError:
            raise SettingError(f"{name}: saw {type(ids).__name__} {shown(ids)}, wanted {expected}") from None
        wrong = [i for i in taken if not 0 <= i < size]
        if wrong:
            raise SettingError(f"{name}: saw token id {wrong[0]}, wanted 0 to {size - 1}")
        return taken

    def of_text(self, text: str) -> list[int]:
        """Ids of a text to continue: with BOS if the file specifies it, never with EOS."""
        ids, bos = self._tokenizer.encode(text), self._tokenizer.bos_id
        if bos is not None and (self._tokenizer.add_bos or not ids):
            return [bos, *ids]
        return ids

    def of_whole_text(self, text: str) -> list[int]:
        """Ids of a text to embed: with BOS and EOS if the file specifies them."""
        return self._tokenizer.encode(text, bos=True) or self.of_text(text)

    def of_messages(self, messages: Sequence[Message], options: TemplateOptions) -> list[int]:
        """Ids of messages through the template; BOS is added only if the template didn't write it.

        Only the template produces control tokens: message contents are always encoded as plain text.

        Raises:
            SettingError: there is no template, or it doesn't support the options.
            ChatTemplateError: the template fails.
        """
        if self._chat_format is None:
            raise SettingError(f"{self._name}: the file holds no chat template; give one (chat_template=)")
        if options.tools:
            self._check_tools(options.tools)
        hidden = self._guard.placeholders()
        variables = self._variables(options.over(self._defaults))
        try:
            shown_messages = [hidden.hide_message(message) for message in messages]
            tools, variables = hidden.hide(list(options.tools)) or None, hidden.hide(variables)
        except RecursionError:
            raise SettingError(
                "messages: nested too deeply, wanted texts, lists and objects as JSON"
            ) from None
        text = self._chat_format.render(shown_messages, tools=tools, **variables)
        if options.constrained:
            text = with_closed_reasoning(text)
        ids = self._tokenizer.encode(text, special=True, restore=hidden.restore)
        bos = self._tokenizer.bos_id
        if self._tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    def of_chat(self, messages: Sequence[Message], options: TemplateOptions) -> list[int]:
        """As `of_messages`, for a chat's history: without the reasoning of earlier responses, as in training,
        or with it in a separate field if a template variable keeps it.
        """
        keeps = options.over(self._defaults).keeps_reasoning
        read = [
            _without_reasoning(message, keeps)
            if message["role"] == "assistant" and isinstance(message["content"], str)
            else message
            for message in messages
        ]
        return self.of_messages(read, options)

    def _variables(self, options: TemplateOptions) -> dict[str, object]:
        """The template's variables. Raises `SettingError` for variables that the template doesn't read."""
        if not options.args and options.thinking is None:
            return {}
        if self._chat_format is None:
            name = "thinking" if options.thinking else "template_args"
            raise SettingError(f"{name}: {self._name} has no chat template; leave it out")
        return options.variables(self._chat_format.variables(bool(options.tools)))

    def _check_tools(self, tools: Sequence[Tool]) -> None:
        """Raise `SettingError` for invalid tools, or a template without support for tools."""
        check_tools(tools)
        assert self._chat_format is not None
        if "tools" not in self._chat_format.variables(with_tools=True):
            raise SettingError(f"tools: the chat template of {self._name} doesn't support them")


def _without_reasoning(message: Message, keeps: bool) -> Message:
    """A response with its reasoning in a separate field (`keeps`), or without it."""
    content = without_reasoning(message["content"])
    if not keeps or content == message["content"]:
        return {**message, "content": content}
    return {**message, "content": content, "reasoning_content": parted(message["content"]).reasoning}
