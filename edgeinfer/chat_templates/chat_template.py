"""A model's chat template, compiled and rendered by Jinja with limits."""

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.utils import Namespace

from edgeinfer.chat_templates.budget import Budget
from edgeinfer.chat_templates.sandbox import WIDEST_INDENT, ChatSandbox
from edgeinfer.errors import ChatTemplateError

_TEMPLATE_FILE = "<template>"
_LONGEST_QUOTE = 160
_LONGEST_REASON = 300


class ChatTemplate:
    """A template's text, compiled when it is first rendered; `now` is the clock of `strftime_now`."""

    def __init__(self, source: str, now: Callable[[], datetime]) -> None:
        self._source = source
        self._now = now

    def render(self, values: Mapping[str, Any]) -> str:
        """Render the template with the values, which are converted to JSON types.

        Raises:
            ChatTemplateError: it fails, or exceeds a limit; the text gives the line.
        """
        try:
            template = self._template
            plain = {key: _plain(value) for key, value in values.items()}
            template.environment.budget = Budget(_characters(plain))  # type: ignore[attr-defined]
            return template.render(plain)
        except Exception as error:  # a template can make Python raise any exception
            raise ChatTemplateError(_explained(error, self._source)) from error

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads before it assigns them.

        Raises:
            ChatTemplateError: it can't be compiled.
        """
        try:
            return frozenset(find_undeclared_variables(_environment(self._now).parse(self._source)))
        except Exception as error:  # as when rendering
            raise ChatTemplateError(_explained(error, self._source)) from error

    @cached_property
    def _template(self) -> jinja2.Template:
        return _environment(self._now).from_string(self._source)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_rendered_body"), [], [], body).set_lineno(line)

    def _rendered_body(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateDict:
    """`dict(…)` without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _TemplateNamespace(Namespace):
    """`namespace(…)` that rejects names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"a namespace can't hold {name!r}: names that begin with an underscore are reserved"
        )


def _environment(now: Callable[[], datetime]) -> ChatSandbox:
    environment = ChatSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.add_filter("tojson", _to_json)
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda form: now().strftime(form),
        dict=_TemplateDict(),
        namespace=_TemplateNamespace,
    )
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int) and indent > WIDEST_INDENT:
        raise SecurityError(f"tojson with an indent of {indent}, wanted {WIDEST_INDENT} at most")
    value = list(value) if isinstance(value, Iterator) else value  # what `map` and `select` return
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(str(message))


def _plain(value: Any) -> Any:
    """Return a copy that contains only JSON types, so that a template can reach no other methods."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


def _characters(value: Any) -> int:
    if isinstance(value, dict):
        return sum(_characters(item) for item in value.values())
    if isinstance(value, list):
        return sum(map(_characters, value))
    return len(value) if isinstance(value, str) else 1


def _explained(error: BaseException, source: str) -> str:
    """Describe an error in one line: its cause, and the number and text of the template line."""
    line = error.lineno if isinstance(error, TemplateSyntaxError) else _failed_line(error)
    lines = source.splitlines()
    where, quote = "", ""
    if line is not None and 0 < line <= len(lines):
        text = lines[line - 1].strip()
        where = f", line {line}"
        quote = f" in: {text if len(text) <= _LONGEST_QUOTE else text[:_LONGEST_QUOTE] + '…'}"
    kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
    reason = " ".join(str(getattr(error, "message", None) or error).split())
    reason = reason if len(reason) <= _LONGEST_REASON else reason[:_LONGEST_REASON] + "…"
    return f"chat template{where}: {kind}{reason}{quote}"


def _failed_line(error: BaseException) -> int | None:
    """Return the innermost line of the template in the error's traceback."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _TEMPLATE_FILE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
