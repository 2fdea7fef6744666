"""Turns a chat into the text that its model was trained on, by the model's own template."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Self

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.parser import Parser
from jinja2.utils import Namespace

from edgeinfer.chat.budget import Budget
from edgeinfer.chat.sandbox import WIDEST_INDENT, ChatSandbox
from edgeinfer.errors import ChatTemplateError
from edgeinfer.language_model import TextTokenizer

_KEY = "tokenizer.chat_template"
_TEMPLATE_FILE = "<template>"
_LONGEST_QUOTE = 160
_TEMPLATE_MISTAKES = (
    *(TemplateError, TypeError, ValueError, AttributeError),
    *(ArithmeticError, LookupError, RecursionError, MemoryError),
)
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

    The rendered text holds the special tokens by name: encode it with `special=True`, and with `bos=True`
    only if it doesn't begin with the text of BOS.

    Source: Hugging Face transformers, `apply_chat_template`, whose renderer this one agrees with.
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
        """Keep the template; it is compiled when it is first used.

        `special_texts` are more names that templates know (`pad_token`, ...); `tool_template_source` is
        what the file wants instead where tools are offered; `now` is the clock behind `strftime_now`.
        """
        self.template_source = template_source
        self.tool_template_source = tool_template_source
        texts = {"bos_token": bos_text, "eos_token": eos_text, **(special_texts or {})}
        self._special_texts = {name: text for name, text in texts.items() if text is not None}
        self._now = now

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], tokenizer: TextTokenizer, name: str | None = None
    ) -> Self:
        """Take the template of a GGUF file, `name` being one of its named ones.

        A file without a template gives a format whose `render` raises.

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
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        ids |= {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _OTHER_SPECIAL.items()}
        size = tokenizer.vocabulary_size
        texts = {
            name: tokenizer.token_bytes(int(token)).decode("utf-8", "replace")
            for name, token in ids.items()
            if token is not None and 0 <= token < size
        }
        return cls(source, special_texts=texts, tool_template_source=tool_source)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of a chat, ending where the model is to answer if `add_generation_prompt`.

        `messages` have "role" and "content"; `tools` are JSON schemas; `variables` are handed to the
        template (`enable_thinking`, ...) and win over the special tokens.

        Raises:
            ChatTemplateError: there is no template, or it fails; the text says where.
        """
        with_tools = tools is not None and self.tool_template_source is not None
        source = self.tool_template_source if with_tools else self.template_source
        if source is None:
            raise ChatTemplateError(
                f"{_KEY} is missing: the file doesn't say how its model wants a chat written. "
                "Name a Jinja template with --chat-template FILE"
            )
        values: dict[str, Any] = {
            **self._special_texts,
            "messages": [_with_reasoning(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        try:
            template = self._tool_template if with_tools else self._template
            plain = {key: _plain(value) for key, value in values.items()}
            template.environment.budget = Budget(_characters(plain))  # type: ignore[attr-defined]
            return template.render(plain)
        except _TEMPLATE_MISTAKES as error:
            raise ChatTemplateError(_explained(error, source)) from error

    @cached_property
    def _template(self) -> jinja2.Template:
        return _environment(self._now).from_string(self.template_source or "")

    @cached_property
    def _tool_template(self) -> jinja2.Template:
        return _environment(self._now).from_string(self.tool_template_source or "")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what the model says; here it says just that."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateDict:
    """`dict(…)` without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _TemplateNamespace(Namespace):
    """`namespace(…)` that holds no name with an underscore before it."""

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
            f"a namespace can't hold {name!r}: names that begin with an underscore are Python's"
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
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(str(message))


def _with_reasoning(message: Message) -> Message:
    """Return the message with its reasoning under both names that templates read."""
    reasoning = next((message[key] for key in _REASONING_KEYS if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Return a copy made of JSON's types alone, so that a template meets no method but theirs."""
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
    """Say in one line what went wrong, on which line of the template, and how that line reads."""
    line = error.lineno if isinstance(error, TemplateSyntaxError) else _failed_line(error)
    lines = source.splitlines()
    where, quote = "", ""
    if line is not None and 0 < line <= len(lines):
        text = lines[line - 1].strip()
        where = f", line {line}"
        quote = f" in: {text if len(text) <= _LONGEST_QUOTE else text[:_LONGEST_QUOTE] + '…'}"
    kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
    told = " ".join(str(getattr(error, "message", None) or error).split())
    return f"chat template{where}: {kind}{told}{quote}"


def _failed_line(error: BaseException) -> int | None:
    """Return the innermost line of the template in the error's traceback."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _TEMPLATE_FILE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
