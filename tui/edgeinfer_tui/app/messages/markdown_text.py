"""Markdown that is streamed, without HTML and links, and its code blocks."""

import json
import re
from collections.abc import Iterable

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Label, Markdown
from textual.widgets.markdown import MarkdownBlock, MarkdownFence

from edgeinfer_tui.output.terminal_output import CONTROL_REPLACEMENTS

ONE_LINE_END = {**CONTROL_REPLACEMENTS, 0x2028: "\n", 0x2029: "\n"}
"""Maps all line separators to newline: Textual and the parser must agree on where a line ends."""

PARTIAL_MARK = re.compile(r"(?:(?<=\n)|\A)[ \t]*(?:\d{1,9}[.)]?|[-*+=#>`~|_ ]+)\Z")
"""Matches an incomplete last line that may become a list, a table, a code block, or plain text."""

BEGINS_AS_JSON = re.compile(r"\s*(?:\{\s*(?:[\"}]|\Z)|\[\s*[{\[\"])")


def _parser() -> MarkdownIt:
    """Markdown parser without HTML; a newline in the text is a line break."""
    parser = MarkdownIt("gfm-like", {"html": False})
    parser.core.ruler.push("line_ends", _keep_line_ends)
    return parser


def _keep_line_ends(state: StateCore) -> None:
    for token in state.tokens:
        for part in token.children or ():
            if part.type == "softbreak":
                part.type = "hardbreak"


def _with_json_as_code(text: str) -> str:
    """Wrap JSON at the start of a response in a code block; Markdown would drop its stars and line breaks."""
    if not BEGINS_AS_JSON.match(text):
        return text
    start = len(text) - len(text.lstrip())
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
    except ValueError:  # incomplete or truncated JSON
        return f"````json\n{text[start:]}"
    return f"````json\n{text[start:end]}\n````\n{text[end:]}"


class CopyLabel(Label):
    """The line above a code block; a click copies the block."""

    def on_click(self) -> None:
        block = self.parent
        assert isinstance(block, CodeBlock)
        self.app.copy_to_clipboard(block.code)
        self.app.notify("copied", timeout=2)


class CodeBlock(MarkdownFence):
    """A code block with a line above that names its language."""

    DEFAULT_CSS = """
    CodeBlock { margin: 0 0 1 0; }
    CodeBlock > Label, CodeBlock:ansi > Label { padding: 0 1; }
    CodeBlock:ansi { margin: 0 0 1 0; }
    CodeBlock > CopyLabel { width: 1fr; color: $text-muted; text-align: right; }
    CodeBlock > CopyLabel:hover { color: $text; text-style: underline; }
    """

    def compose(self) -> ComposeResult:
        yield CopyLabel(Content(f"{self.lexer or 'text'} [copy]"))
        yield from super().compose()


class MarkdownText(Markdown):
    """Markdown that is streamed."""

    DEFAULT_CSS = """
    MarkdownText { padding: 0; margin: 0; layout: vertical; height: auto; }
    MarkdownText > MarkdownParagraph { margin: 0 0 1 0; }
    """

    def __init__(self) -> None:
        super().__init__(parser_factory=_parser, open_links=False)
        self._shown = ""

    def get_block_class(self, block_name: str) -> type[MarkdownBlock]:
        """The widget class of a block: ours for code, else Textual's."""
        own = super().get_block_class(block_name)
        return CodeBlock if own is MarkdownFence else own

    async def show(self, text: str, ended: bool = True) -> None:
        """Display `text`; if it extends the text shown, only the rest is appended. `ended` False: more will
        follow."""
        text = _with_json_as_code(text.translate(ONE_LINE_END))
        if not ended and (partial := PARTIAL_MARK.search(text)) and partial.start() >= len(self._shown):
            text = text[: partial.start()]
        if not text.startswith(self._shown):
            await self.update("")
            self._shown = ""
        # `append` after an `update` with a text would drop the last block of that text.
        if text != self._shown:
            await self.append(text[len(self._shown) :])
            self._shown = text

    def codes(self) -> Iterable[str]:
        """Contents of its code blocks, in order."""
        return [block.code for block in self.query(CodeBlock)]
