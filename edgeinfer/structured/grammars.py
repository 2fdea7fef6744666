"""Grammars: a JSON schema, a Lark or GBNF grammar, or a regular expression, compiled.

The compiler and the masks are llguidance's (https://github.com/guidance-ai/llguidance).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from edgeinfer.errors import SettingError, shown
from edgeinfer.structured.closed_objects import MAX_DEPTH, with_closed_objects
from edgeinfer.structured.compiler import compiled

SHORT_SPACES = {"whitespace_pattern": r" ?|\n[ \t]{0,20}"}
"""Allowed between values: a space, or a newline with indentation; small models tend to repeat
longer whitespace."""


@dataclass(frozen=True)
class Grammar:
    """`kind`: its user-facing name; `compiled`: the input for llguidance."""

    kind: str
    compiled: str


def engine() -> ModuleType:
    """llguidance, imported at first use. Raises `SettingError` if it isn't installed."""
    try:
        import llguidance
    except ImportError:
        raise SettingError(
            "schema, grammar: need llguidance, which isn't installed; pip install 'edgeinfer[structured]'"
        ) from None
    return llguidance


def json_schema(schema: Mapping[str, Any] | str | bool) -> Grammar:
    """The grammar of the JSON texts that a schema allows.

    `schema`: its text, or the parsed JSON; `True` or `{}` allow any JSON.

    Raises:
        SettingError: it isn't JSON, or not a schema; or llguidance isn't installed.
    """
    parsed: Any = schema
    if isinstance(schema, str):
        try:
            parsed = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise SettingError(f"schema: saw no JSON ({error}), wanted a JSON schema") from None
    if not isinstance(parsed, Mapping | bool):
        raise SettingError(f"schema: saw {type(parsed).__name__} {shown(parsed)}, wanted a JSON schema")
    if parsed is True:
        parsed = {}
    try:
        text = json.dumps(with_closed_objects(parsed), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SettingError(
            f"schema: {error}; wanted what JSON can hold, {MAX_DEPTH} levels at most"
        ) from None
    engine()
    options = SHORT_SPACES if parsed else {}
    return Grammar("schema", compiled("schema", text, json.dumps(options)))


def grammar(text: str) -> Grammar:
    """A grammar in Lark syntax, or in llama.cpp's GBNF.

    Raises:
        SettingError: it can't be parsed or compiled; or llguidance isn't installed.
    """
    if not isinstance(text, str):
        raise SettingError(f"grammar: saw {type(text).__name__}, wanted the text of a grammar")
    engine()
    return Grammar("grammar", compiled("grammar", text))


def requested_grammar(schema: Mapping[str, Any] | str | bool | None, text: str | None) -> Grammar | None:
    """The grammar from the schema or the text, whichever is given. Raises `SettingError` for both."""
    if schema is not None and text is not None:
        raise SettingError("schema, grammar: saw both, wanted one of them")
    if schema is not None:
        return json_schema(schema)
    return None if text is None else grammar(text)
