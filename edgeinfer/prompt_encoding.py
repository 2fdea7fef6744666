"""Prompts to token ids: texts, ids as they are given, and messages through the chat template."""

import operator
import re
from collections.abc import Sequence

from edgeinfer.chat.chat_format import ChatFormat
from edgeinfer.chat.thoughts import with_closed_thought
from edgeinfer.chat.tool_calls import Tool, check_tools
from edgeinfer.errors import SettingError
from edgeinfer.language_model import TextTokenizer
from edgeinfer.prompts import Prompt, messages_of
from edgeinfer.session import Message
from edgeinfer.shown import shown

_COMMENTS = re.compile(r"\{#.*?#\}", re.DOTALL)


class PromptEncoding:
    """One model's way; `name`: the model's, for errors."""

    def __init__(
        self, name: str, tokenizer: TextTokenizer, chat_format: ChatFormat | None, vocabulary_size: int
    ) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._chat_format = chat_format
        self._vocabulary_size = vocabulary_size

    def of_prompt(self, prompt: Prompt, raw: bool, tools: Sequence[Tool] | None, formed: bool) -> list[int]:
        """Whatever `generate` takes; `raw` and `tools` as there, `formed` as for `of_messages`.

        Raises:
            SettingError: it is none of these, or the model has no way to take it.
        """
        if not isinstance(raw, bool):
            raise SettingError(f"raw: saw {shown(raw)}, wanted True or False")
        if tools is not None:
            check_tools(tools)
        messages = messages_of(prompt)
        if messages is None and tools:
            raise SettingError("tools: the prompt isn't a chat's messages, which a template puts them into")
        if messages is not None:
            return self.of_messages(messages, formed, tools)
        if not isinstance(prompt, str):
            return self.of_ids(prompt)  # type: ignore[arg-type]
        if raw:
            return self.of_text(prompt)
        return self.of_messages([{"role": "user", "content": prompt}], formed)

    def of_ids(self, ids: Sequence[int], name: str = "prompt") -> list[int]:
        """Ids as they are. Raises `SettingError`, naming what was asked for, if the vocabulary lacks one."""
        size = self._vocabulary_size
        wanted = "a text or whole numbers" if name == "prompt" else "whole numbers"
        try:
            if isinstance(ids, bytes | bytearray):
                raise TypeError
            taken = [operator.index(i) for i in ids]
        except TypeError:
            raise SettingError(f"{name}: saw {type(ids).__name__} {shown(ids)}, wanted {wanted}") from None
        wrong = [i for i in taken if not 0 <= i < size]
        if wrong:
            raise SettingError(f"{name}: saw token id {wrong[0]}, wanted 0 to {size - 1}")
        return taken

    def of_text(self, text: str) -> list[int]:
        """A text to continue: with BOS where the file wants it, never with the EOS that would end it."""
        ids, bos = self._tokenizer.encode(text), self._tokenizer.bos_id
        if bos is not None and (self._tokenizer.add_bos or not ids):
            return [bos, *ids]
        return ids

    def of_messages(
        self, messages: Sequence[Message], formed: bool, tools: Sequence[Tool] | None = None
    ) -> list[int]:
        """Messages through the template; BOS is added only if the template didn't write it. `formed`: the
        answer keeps to a form, which has no room for a thought: one that the template opens is ended.

        Raises `SettingError` where there is no template.
        """
        if self._chat_format is None:
            raise SettingError(
                f"{self._name}: the file holds no chat template; give one with --chat-template FILE "
                "(chat_template=)"
            )
        if tools and not _writes_tools(self._chat_format):
            raise SettingError(f"tools: the chat template of {self._name} has no place for them")
        text = self._chat_format.render(messages, tools=tools or None)
        ids = self._tokenizer.encode(with_closed_thought(text) if formed else text, special=True)
        bos = self._tokenizer.bos_id
        if self._tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids


def _writes_tools(chat_format: ChatFormat) -> bool:
    """Whether the template that is used where tools are offered mentions them, outside of comments."""
    source = chat_format.tool_template_source or chat_format.template_source or ""
    return re.search(r"\btools\b", _COMMENTS.sub("", source)) is not None
