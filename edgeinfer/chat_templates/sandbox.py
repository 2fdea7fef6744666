"""The sandbox for chat templates: it can read the chat and produce text, within limits.

A template comes with a downloaded file and may be malicious. Jinja's sandbox denies access to Python. This
module also limits time and memory: every loop iteration and every macro call is a step, the size of every
operation's result is counted, and both are limited.
"""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import filters, nodes, pass_environment, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from edgeinfer.chat_templates.budget import Budget

LARGEST_ARGUMENT = 1_000_000
WIDEST_INDENT = 64
MAX_BITS = 4096
MAX_SOURCE_BYTES = 1 << 20
"""Compilation takes seconds per megabyte, and a thousand times the size in memory."""

_LIST_METHODS = ("append", "pop")
_WIDE_FORMAT = re.compile(r"\d{7,}")
_NESTING_FILTERS = frozenset({"batch", "slice", "groupby"})
_TEXT_FILTERS = frozenset(
    {"string", "tojson", "pprint", "format", "escape", "e", "forceescape", "safe", "trim"}
)
_TEXT_FILTERS |= {"upper", "lower", "capitalize", "title", "center", "truncate", "wordcount", "wordwrap"}
_TEXT_FILTERS |= {"striptags", "urlize", "xmlattr", "urlencode"}


class ChatSandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with a budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        self.budget = Budget(0)
        super().__init__(finalize=self._weighed, **options)
        del self.globals["lipsum"]
        own = {"join": self._join, "replace": self._replace, "indent": self._indent, "sum": self._sum}
        own["wordwrap"] = self._wordwrap
        self.filters = {name: self._guarded(name, check) for name, check in (self.filters | own).items()}

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add a custom filter, with the same checks as Jinja's."""
        self.filters[name] = self._guarded(name, function)

    def count_step(self, characters: int) -> None:
        """Count a loop iteration whose own text has `characters`. Called by compiled templates."""
        self.budget.count_step(characters)

    def join_texts(self, *parts: object) -> str:
        """Join the operands of `~`. Called by compiled templates."""
        return "".join(str(self._weighed(part)) for part in parts)

    def weigh_literal(self, value: Any) -> Any:
        """Count the size of a list, tuple or dict literal. Called by compiled templates."""
        return self._weighed(value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Evaluate an operator whose result can be much larger than its operands."""
        if operator == "%" and isinstance(left, str):
            _refuse_wide_format(left)
            _refuse_large(right if isinstance(right, tuple) else (right,))
            self._weighed(right)
        elif isinstance(left, int | float) and isinstance(right, int | float):
            _refuse_large_number(operator, left, right)
        elif operator == "*":
            value, times = (right, left) if isinstance(left, int) else (left, right)
            self.budget.count_value(value, times if isinstance(times, int) else 1)
        elif operator == "+":
            self.budget.count(_length(left) + _length(right))
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow also `append` and `pop` of lists: a template's lists are copies made for one rendering."""
        if isinstance(obj, list) and attr in _LIST_METHODS:
            return True
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, function: Any, /, *args: Any, **given: Any) -> Any:
        """Call a function or method for a template; Jinja's own keywords begin with an underscore."""
        kwargs = {key: value for key, value in given.items() if not key.startswith("_")}
        _refuse_large(args)
        _refuse_large(kwargs.values())
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, list):
            self._weighed(args)
        if isinstance(owner, str):
            if name == "translate":
                raise SecurityError("str.translate is not for templates")
            if name == "join" and args:
                args = (self._joinable(args[0], owner),)
            elif name == "replace" and len(args) > 1:
                return self._replace(owner, *args, **kwargs)
            elif name == "expandtabs":
                self.budget.count(owner.count("\t") * max([8, *args, *kwargs.values()]))
        return self._weighed(super().call(context, function, *args, **given))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandboxed `str.format` for a text whose field widths are within the limit."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _refuse_wide_format(value.__self__)
        return wrapped

    def compile(self, source: Any, *args: Any, **kwargs: Any) -> Any:
        """Compile a template's text, unless it is too long."""
        size = len(source.encode("utf-8", "replace")) if isinstance(source, str) else 0
        if size > MAX_SOURCE_BYTES:
            raise SecurityError(f"saw {size} bytes of template, wanted {MAX_SOURCE_BYTES} at most")
        return super().compile(source, *args, **kwargs)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_StepCounter().visit(source), *args, **kwargs)

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            _refuse_large(args)
            _refuse_large(kwargs.values())
            for value in (*args, *kwargs.values()):
                if name == "format" and isinstance(value, str):
                    _refuse_wide_format(value)
                if name in _TEXT_FILTERS:
                    self._weighed(value)
            made = function(*args, **kwargs)
            if name in _NESTING_FILTERS:
                made = list(made)
                return self._weighed(made)
            self.budget.count(_length(made))
            return made

        return guarded

    @pass_eval_context
    def _join(self, context: Any, value: Any, d: Any = "", attribute: str | int | None = None) -> Any:
        return filters.sync_do_join(context, self._joinable(value, str(d)), d, attribute)

    def _joinable(self, values: Iterable[Any], separator: str) -> list[Any]:
        listed = list(values)
        self.budget.count(len(listed) * len(separator))
        return self._weighed(listed)  # type: ignore[no-any-return]

    def _replace(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        value, old, new = (str(self._weighed(text)) for text in (value, old, new))
        limit = -1 if count is None else count
        occurrences = value.count(old)
        self.budget.count(len(value) + (occurrences if limit < 0 else min(occurrences, limit)) * len(new))
        return str(value.replace(old, new, limit))

    def _indent(self, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        text = str(self._weighed(value))
        size = width if isinstance(width, int) else len(width)
        self.budget.count(len(text) + len(text.splitlines()) * size)
        return filters.do_indent(text, width, first, blank)

    @pass_environment
    def _wordwrap(self, *args: Any, **kwargs: Any) -> str:
        environment, text, width = args[0], str(self._weighed(args[1])), kwargs.get("width", [*args, 79][2])
        longest = max(map(len, text.split()), default=0)
        # The rest of a long word is copied for each piece that is cut off.
        self.budget.count(len(text) + longest * longest // max(int(width), 1))
        return filters.do_wordwrap(environment, text, *args[2:], **kwargs)

    @pass_environment
    def _sum(self, *args: Any, **kwargs: Any) -> Any:
        environment, values, *rest = args
        listed = list(values)
        if all(isinstance(value, list | tuple) for value in listed):
            # Each list is copied after the lists before it.
            self.budget.count(len(listed) * sum(map(len, listed)))
        return filters.sync_do_sum(environment, listed, *rest, **kwargs)

    def _weighed(self, value: Any) -> Any:
        self.budget.count_value(value)
        return value


class _StepCounter(NodeTransformer):
    """Makes loop and macro bodies count a step, and counts the results of `~` and of literals."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        return self._counting(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._counting(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._counting(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _environment_call("join_texts", node.nodes, node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return self._weighing(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return self._weighing(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self._weighing(node) if node.ctx == "load" else node

    def _weighing(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return _environment_call("weigh_literal", [node], node.lineno)

    def _counting(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        characters = sum(len(data.data) for child in node.body for data in _template_data(child))
        step = _environment_call("count_step", [nodes.Const(characters)], node.lineno)
        node.body.insert(0, nodes.ExprStmt(step).set_lineno(node.lineno))
        return node  # type: ignore[no-any-return]


def _environment_call(method: str, arguments: list[Any], line: int) -> nodes.Node:
    call = nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)
    return call.set_lineno(line)


def _template_data(node: nodes.Node) -> Iterable[nodes.TemplateData]:
    return [node] if isinstance(node, nodes.TemplateData) else node.find_all(nodes.TemplateData)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict) else 1


def _refuse_large(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > LARGEST_ARGUMENT:
            raise SecurityError(f"a number beyond {LARGEST_ARGUMENT} passed to a function")


def _refuse_wide_format(template: str) -> None:
    if _WIDE_FORMAT.search(template):
        raise SecurityError(f"a field wider than {LARGEST_ARGUMENT} in a format")


def _refuse_large_number(operator: str, left: float, right: float) -> None:
    bits = [abs(value).bit_length() if isinstance(value, int) else 64 for value in (left, right)]
    power = operator == "**" and isinstance(right, int)
    if (bits[0] * abs(right) if power else sum(bits)) > MAX_BITS:
        raise SecurityError(f"a number of more than {MAX_BITS} bits")
