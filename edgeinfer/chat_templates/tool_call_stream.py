"""Streams the text of a response with tools: text is held back where a tool call may begin."""

from edgeinfer.chat_templates.call_formats import CALL_MARKS
from edgeinfer.chat_templates.reasoning import split_reasoning
from edgeinfer.chat_templates.tool_calls import ParsedReply


class ToolCallStream:
    """The text of one response that is certainly not part of a tool call.

    Spaces at the end of the text are held back as well, because they are removed before a call.
    """

    def __init__(self) -> None:
        self._text = ""
        self._sent = 0
        self._held = False

    def add(self, text: str, token_text: str) -> str:
        """Return the text that can be sent after a token: `text` is its visible text, `token_text` that of
        the token itself, which may be a special token.
        """
        self._held = self._held or any(mark in token_text for mark in CALL_MARKS)
        if self._held:
            return ""
        self._text += text
        end = self._safe_end()
        sent, self._sent = self._text[self._sent : end], max(self._sent, end)
        return sent

    def rest(self, reply: ParsedReply, visible: str) -> str:
        """Return the text that remains to be sent at the end. `visible`: the text without special tokens."""
        sent = self._text[: self._sent]
        if not reply.calls:
            return visible[len(sent) :]
        content = reply.content
        sent = sent.strip()
        return content[len(sent) :] if content.startswith(sent) else ""

    def _safe_end(self) -> int:
        text = self._text
        starts = [text.find(mark) for mark in CALL_MARKS if mark in text]
        if starts or split_reasoning(text)[1].lstrip()[:1] in ("{", "["):
            self._held = True
            return max(self._sent, len(text[: min(starts, default=0)].rstrip()))
        # Hold back a mark that has begun at the end of the text, and the spaces before it.
        partial = (
            length
            for mark in CALL_MARKS
            for length in range(1, min(len(mark), len(text) + 1))
            if text.endswith(mark[:length])
        )
        return max(self._sent, len(text[: len(text) - max(partial, default=0)].rstrip()))
