"""The message input; `@path` is replaced by the file's text, a pasted path becomes `@path`."""

import re
import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

from textual import events
from textual.message import Message
from textual.widgets import TextArea

from edgeinfer.errors import SettingError

MAX_BYTES = 2 * 1024 * 1024
SENTENCE_END = ".,;:!?)"
FILE_NAME = re.compile(
    r"[\w./~+-]*\w\.(?:txt|md|rst|pdf|csv|tsv|log|json|jsonl|ya?ml|toml|ini|xml|html|css|sql|sh|c|h|cc|cpp|hpp|"
    r"py|js|ts|tsx|jsx|go|rs|java|kt|rb|php|swift|lua|tex|ipynb|diff|patch|conf|cfg|env|gguf)",
    re.IGNORECASE,
)
"""Matches a mention that is only a file name with the extension of a text file."""
MENTION = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|(\S+))')


def with_files(message: str) -> str:
    """Return the message with the contents of its files appended; an @ that is no path is unchanged.

    Raises:
        SettingError: the file does not exist, is too long or isn't text.
        OSError: the file can't be read.
    """
    missing = [name for name in map(_missing, MENTION.finditer(message)) if name]
    if missing:
        raise SettingError(f"@{missing[0]}: no such file; the message wasn't sent")
    paths = [path for path in map(_path, MENTION.finditer(message)) if path is not None]
    parts = [message, *(_quoted(path) for path in dict.fromkeys(paths))]
    return "\n\n".join(parts)


def mention_of(pasted: str) -> str | None:
    """`@path` for a pasted text that is a file path (terminals paste a dropped file's path), else None."""
    text = pasted.strip()
    if "\n" in text or len(text) > 4096:
        return None
    try:
        if text.startswith("file://"):
            text = url2pathname(urlparse(text).path)
        if not text:
            return None
        words = shlex.split(text) if text[0] in "'\"" or "\\ " in text else [text]
    except (OSError, ValueError):  # no URL of a file on this system, or an unclosed quote
        return None
    if len(words) != 1 or not _rooted(words[0]) or not _is_file(Path(words[0]).expanduser()):
        return None
    return f'@"{words[0]}"' if " " in words[0] else f"@{words[0]}"


def _rooted(text: str) -> bool:
    """Whether the text is certainly a path; a plain word could also be a file name."""
    return text.startswith(("/", "~/", "./", "../")) or re.match(r"[A-Za-z]:[\\/]", text) is not None


def _path(match: re.Match[str]) -> Path | None:
    quoted, bare = match.groups()
    # Windows ignores a dot after a name, so the name without it comes first.
    for name in [quoted] if quoted else [bare.rstrip(SENTENCE_END), bare]:
        path = Path(name).expanduser()
        if _is_file(path):
            return path
    return None


def _missing(match: re.Match[str]) -> str | None:
    """The path of a mention whose file does not exist; None if it exists or may not be a path (@someone)."""
    quoted, bare = match.groups()
    is_path = quoted is not None or _rooted(bare) or FILE_NAME.fullmatch(bare.rstrip(SENTENCE_END))
    return (quoted or bare) if is_path and _path(match) is None else None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or not a path
        return False


def _quoted(path: Path) -> str:
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise SettingError(f"{path}: {size} bytes, wanted {MAX_BYTES} at most")
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise SettingError(f"{path}: no text in UTF-8, which is all that a message can hold") from None
    if "\0" in text:
        raise SettingError(f"{path}: no text, which is all that a message can hold")
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{path.name}:\n{fence}{path.suffix.lstrip('.')}\n{text.rstrip()}\n{fence}"


NEW_LINE = ("ctrl+j", "shift+enter", "alt+enter")


class MessageInput(TextArea):
    """Enter sends; a pasted file path becomes a mention. All other keys are handled by TextArea."""

    class Submitted(Message):
        """A message or a command was entered."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Exited(Message):
        """Ctrl-D or Up in an empty input: focus moves out of the input."""

        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    def __init__(self, complete: Callable[[str], Awaitable[str]]) -> None:
        """`complete` returns the text that Tab completes the input to."""
        super().__init__(id="input", compact=True, soft_wrap=True, highlight_cursor_line=False)
        self._complete = complete
        self.placeholder = "Type a message; F1 shows help"

    def send(self) -> None:
        """Send the text, as Enter does."""
        if self.text.strip():
            self.post_message(self.Submitted(self.text))

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.stop()
            event.prevent_default()
            self.send()
        elif event.key in NEW_LINE:
            event.stop()
            event.prevent_default()
            self.insert("\n")
        elif event.key == "tab" and self.text:
            event.stop()
            event.prevent_default()
            # Keys typed during completion are queued until it is done.
            completed = await self._complete(self.text)
            if completed != self.text:
                self.text = completed
                self.move_cursor(self.document.end)
        elif event.key == "ctrl+u":
            event.stop()
            event.prevent_default()
            self.clear()
        elif event.key in ("ctrl+d", "up") and not self.text:
            event.stop()
            event.prevent_default()
            self.post_message(self.Exited(event.key))

    async def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        self.paste(event.text)

    def paste(self, text: str) -> None:
        """Replace the selection by the pasted text; a file path becomes a mention."""
        mention = mention_of(text)
        self.replace(text if mention is None else f"{mention} ", *self.selection)
        self.focus()
