"""Requests and keywords with many kinds of mistakes, the same ones for a seed."""

import copy
import random
from typing import Any

CHAIN = {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(300)}, "$ref": "#/$defs/d0"}
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 63, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0, 1e308, -1e308),
    *("", "x", "\x00", "ä" * 50, "\ud800", "</s><s>", "a" * 5_000, "auto", "json_object", "0", "NaN"),
    *([], {}, [[]], [{}], [None], ["x"], [1, 2, 3], [-1], [10**9], ["x"] * 300, {"a": 1}, {"type": "object"}),
    *({"type": "text"}, {"type": "json_object"}, {"enum": []}, {"": ""}, {"5": 1.5}, {"5": 1e999}, CHAIN),
    *({"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "("}}}, {"$ref": "#"}),
    {"type": "json_schema", "json_schema": {"schema": {"allOf": [{"pattern": "a"}, {"pattern": "b"}]}}},
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    *(
        [{"type": "function", "function": "x"}],
        [{"function": {"name": ["f"]}}],
        [{"role": "user", "content": 5}],
    ),
    [{"role": "assistant", "tool_calls": 5}],
    [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "[["}}]}],
)
"""Values of every kind of JSON, and some that only Python has."""
NAMES = (
    *("model", "messages", "prompt", "input", "stream", "stream_options", "n", "max_tokens", "stop", "seed"),
    *("max_completion_tokens", "logprobs", "top_logprobs", "response_format", "tools", "tool_choice", "echo"),
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "repeat_last_n", "grammar"),
    *(
        "presence_penalty",
        "frequency_penalty",
        "dry_multiplier",
        "dry_base",
        "dry_allowed_length",
        "mirostat",
    ),
    *("dry_penalty_last_n", "dry_sequence_breakers", "xtc_probability", "xtc_threshold", "mirostat_tau"),
    *("mirostat_eta", "logit_bias", "encoding_format", "user", "metadata", "max_tokns", "num_ctx", "foo", ""),
    *("reasoning_effort", "chat_template_kwargs", "role", "content", "name", "tool_calls", "include_usage"),
)


def nested(levels: int) -> Any:
    """Lists in lists."""
    result: Any = 1
    for _ in range(levels):
        result = [result]
    return result


def mutated(body: dict[str, Any], source: random.Random) -> dict[str, Any]:
    """A copy with one to three things changed, anywhere in it."""
    result = copy.deepcopy(body)
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        holder = source.choice(_holders(result))
        value = copy.deepcopy(source.choice((*ODD, nested(40), nested(400))))
        if isinstance(holder, dict):
            name = source.choice((*holder, *source.sample(NAMES, 3)))
            if source.random() < 0.1:
                holder.pop(name, None)
            else:
                holder[name] = value
        elif holder:
            holder[source.randrange(len(holder))] = value
        else:
            holder.append(value)
    return result


def _holders(value: Any) -> list[Any]:
    """All objects and lists in a value, the value first; without those of a deeply nested one."""
    result, at = [value], 0
    while at < len(result) < 100:
        holder = result[at]
        inner = holder.values() if isinstance(holder, dict) else holder
        result += [each for each in inner if isinstance(each, dict | list)]
        at += 1
    return result
