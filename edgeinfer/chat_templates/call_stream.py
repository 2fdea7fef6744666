"""Streams tool calls while a model writes them: the name first, then pieces of the arguments.

Arguments that the model writes as a JSON object are streamed as they are. Calls in other formats are sent
when they are complete, or at the end of the response.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgeinfer.chat_templates import call_readers
from edgeinfer.chat_templates.call_formats import CALL_FORMATS, CALL_MARKS, CallFormat
from edgeinfer.chat_templates.json_scanner import JsonObjectScanner
from edgeinfer.chat_templates.tool_calls import Tool, ToolCall, calls_of_match, schemas_of

_JSON_GROUP = "(?P<json>"
_OBJECT_HEAD = r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
_NEXT_OBJECT = re.compile(r"\s*\}\s*[,;]?" + _OBJECT_HEAD)


@dataclass(frozen=True)
class CallDelta:
    """A piece of call `index`: its name at its beginning, then text of its arguments, a JSON object."""

    index: int
    name: str | None
    arguments: str


def _opening(form: CallFormat) -> re.Pattern[str] | None:
    """The pattern of a format up to the JSON object with the arguments; None: it has none."""
    if _JSON_GROUP not in form.pattern.pattern:
        return None
    before = form.pattern.pattern.partition(_JSON_GROUP)[0]
    if form.read is call_readers.named_json:
        return re.compile(before + r"\s*(?=\{)", re.DOTALL)
    return re.compile(before + r"\s*\[?" + _OBJECT_HEAD, re.DOTALL)


_LONGEST_MARK = max(map(len, CALL_MARKS))
_OPENINGS = tuple(opening for form in CALL_FORMATS if (opening := _opening(form)) is not None)
_CLOSED_FORMATS = tuple(
    form
    for form in CALL_FORMATS
    if _JSON_GROUP not in form.pattern.pattern and "$)" not in form.pattern.pattern
)
"""Formats without JSON whose calls have a closing mark."""


class CallStream:
    """The calls of one response. `parallel`: there may be more than one."""

    def __init__(self, tools: Sequence[Tool], parallel: bool = True) -> None:
        self._schemas = schemas_of(tools)
        self._parallel = parallel
        self._text = ""
        self._marked = False
        self._at = 0
        """End of the text that needs no further search."""
        self._scanner: JsonObjectScanner | None = None
        """Of the arguments that are being written."""
        self._after_object = False
        self._count = 0

    def add(self, piece: str) -> list[CallDelta]:
        """The deltas after a piece of the response, with special tokens."""
        self._text += piece
        if not self._may_call(piece):
            return []
        deltas = []
        while (delta := self._next()) is not None:
            deltas.append(delta)
        return [delta for delta in deltas if self._parallel or delta.index == 0]

    def rest(self, calls: Sequence[ToolCall]) -> list[CallDelta]:
        """The deltas of the calls of the whole response that have not been sent."""
        return [
            CallDelta(index, call.name, arguments_text(call))
            for index, call in enumerate(calls)
            if index >= self._count
        ]

    def _may_call(self, piece: str) -> bool:
        """Whether a call may have begun: there was a mark of one, or the response begins with JSON."""
        if not self._marked:
            end = self._text[-_LONGEST_MARK - len(piece) :]
            self._marked = any(mark in end for mark in CALL_MARKS) or self._text.lstrip()[:1] in ("{", "[")
        return self._marked

    def _next(self) -> CallDelta | None:
        if self._scanner is not None:
            return self._arguments(self._scanner)
        begun = next(self._begun(), None)
        if begun is not None:
            self._at, self._scanner = begun.end(), JsonObjectScanner()
            self._count += 1
            return CallDelta(self._count - 1, begun["name"].strip(), "")
        return self._whole_call()

    def _arguments(self, scanner: JsonObjectScanner) -> CallDelta | None:
        end = scanner.take(self._text, self._at)
        text, self._at = self._text[self._at : end], end
        if scanner.ended:
            self._scanner, self._after_object = None, True
        return CallDelta(self._count - 1, None, text) if text else None

    def _begun(self) -> Iterator[re.Match[str]]:
        """The calls that begin next, the first one first."""
        found = [match for pattern in _OPENINGS if (match := pattern.search(self._text, self._at))]
        if self._after_object and (further := _NEXT_OBJECT.match(self._text, self._at)):
            found.append(further)
        known = [match for match in found if match["name"].strip() in self._schemas]
        yield from sorted(known, key=lambda match: match.start())

    def _whole_call(self) -> CallDelta | None:
        """The next complete call in a format without JSON."""
        if ">" not in self._text[self._at :]:
            return None
        for form in _CLOSED_FORMATS:
            match = form.pattern.search(self._text, self._at)
            calls = list(calls_of_match(form, match, self._schemas)) if match else []
            if match and calls:
                self._at = match.end()
                self._count += 1
                return CallDelta(self._count - 1, calls[0].name, arguments_text(calls[0]))
        return None


def arguments_text(call: ToolCall) -> str:
    """The arguments of a call as JSON."""
    return json.dumps(call.arguments, ensure_ascii=False)
