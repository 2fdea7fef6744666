"""The grammar of forced tool calls: a JSON object with the name of a tool and arguments of its schema."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from edgeinfer.chat_templates.tool_calls import Tool, schemas_of
from edgeinfer.errors import SettingError
from edgeinfer.structured.closed_objects import with_closed_objects
from edgeinfer.structured.grammars import SHORT_SPACES

MAX_CALLS = 8
"""Maximum calls of one response, if several are allowed."""


def call_grammar(
    tools: Sequence[Tool], several: bool = False, or_schema: Mapping[str, Any] | None = None
) -> str:
    """The text of the grammar in Lark's syntax, for `grammar`.

    `several`: the response is a list of 1 to `MAX_CALLS` calls instead of one call. `or_schema`: it may also
    be JSON of this schema.

    Raises:
        SettingError: there is no tool, or a schema is nested too deeply.
    """
    schemas = schemas_of(tools)
    if not schemas:
        raise SettingError("tool_choice: saw no tools, wanted at least one to call")
    calls = " | ".join(f"call{index}" for index in range(len(schemas)))
    response = _list_of_calls() if several else "call"
    rules = [f"start: {response}" if or_schema is None else f"start: {response} | response", f"call: {calls}"]
    if or_schema is not None:
        rules.append(f"response: %json {json.dumps(_spaced(with_closed_objects(or_schema)))}")
    for index, (name, schema) in enumerate(schemas.items()):
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        rules.append(f'call{index}: {_literal(head)} arguments{index} "}}"')
        rules.append(f"arguments{index}: %json {json.dumps(_arguments(schema))}")
    return "\n".join(rules) + "\n"


def _list_of_calls() -> str:
    return f'"[" call (", " call){{0,{MAX_CALLS - 1}}} "]"'


def _literal(text: str) -> str:
    """A text as a literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def _arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object."""
    given = with_closed_objects({"type": "object", "properties": {}, **schema})
    return _spaced({**given, "type": "object"})


def _spaced(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": SHORT_SPACES}
