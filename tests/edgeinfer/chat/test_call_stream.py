"""Tool calls are streamed while they are written: names first, then pieces of the arguments."""

import json

import pytest

from edgeinfer.chat_templates.call_stream import CallDelta, CallStream
from edgeinfer.chat_templates.tool_calls import parse_tool_calls
from tests.edgeinfer.chat.test_tool_calls import ARGUMENTS, CODER, FORMS, TOOLS

HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


def streamed(text: str, parallel: bool = True) -> tuple[list[CallDelta], list[CallDelta]]:
    """The deltas while the text is written, one character at a time, and those at its end."""
    stream = CallStream(TOOLS, parallel)
    during = [delta for character in text for delta in stream.add(character)]
    calls = parse_tool_calls(text, TOOLS).calls
    return during, stream.rest(calls if parallel else calls[:1])


def joined(deltas: list[CallDelta]) -> list[tuple[str, object]]:
    """The name and the arguments of each call."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for delta in deltas:
        if delta.name is not None:
            assert delta.index not in names
            names[delta.index] = delta.name
        arguments[delta.index] = arguments.get(delta.index, "") + delta.arguments
    return [(names[index], json.loads(arguments[index])) for index in sorted(names)]


@pytest.mark.parametrize("vendor", FORMS)
def test_the_deltas_of_a_call_are_its_name_and_arguments(vendor: str) -> None:
    during, rest = streamed(FORMS[vendor])
    assert joined([*during, *rest]) == [("get_weather", {"city": "Zürich", "days": 2})]


@pytest.mark.parametrize(
    "text",
    [
        f'{HERMES}\n<tool_call>{{"name": "get_time", "arguments": {{}}}}</tool_call>',
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}, '
        '{"name": "get_time", "arguments": {}}]',
        f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}; {{"name": "get_time", "parameters": {{}}}}',
        f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]get_time[ARGS]{{}}</s>",
        f"<tool_call>\n{CODER}\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        '<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:2}<tool_call|>'
        "<|tool_call>call:get_time{}<tool_call|>",
    ],
)
def test_several_calls_are_streamed_in_order(text: str) -> None:
    during, rest = streamed(text)
    assert joined([*during, *rest]) == [
        ("get_weather", {"city": "Zürich", "days": 2}),
        ("get_time", {}),
    ]
    first, rest = streamed(text, parallel=False)
    assert [name for name, _ in joined([*first, *rest])] == ["get_weather"]


def test_the_arguments_are_sent_before_the_call_ends() -> None:
    written = HERMES.partition('"days"')[0]
    during, _ = streamed(written)
    assert during[0] == CallDelta(0, "get_weather", "")
    assert "".join(delta.arguments for delta in during) == '{"city": "Zürich", '


def test_a_name_that_is_not_offered_and_braces_in_prose_are_no_calls() -> None:
    for text in (
        '<tool_call>{"name": "other", "arguments": {"a": 1}}</tool_call>',
        'Write {"name": "get_weather", "arguments": {"a": 1}} there.',
        '{"a": "}"}',
    ):
        assert streamed(text) == ([], [])


def test_brackets_and_quotes_inside_of_strings_do_not_end_the_arguments() -> None:
    arguments = {"city": 'a } " \\ ] {', "days": 1}
    text = f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(arguments)}}}</tool_call>'
    during, rest = streamed(text)
    assert rest == []
    assert joined(during) == [("get_weather", arguments)]
