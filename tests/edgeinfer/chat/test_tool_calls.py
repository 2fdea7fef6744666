"""Tool calls in the formats of many templates; other text stays text."""

from typing import Any

import pytest

from edgeinfer.chat_templates.tool_calls import ParsedReply, ToolCall, parse_tool_calls

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
    {"name": "get_time", "parameters": {}},
]
CALL = ToolCall("get_weather", {"city": "Zürich", "days": 2})
ARGUMENTS = '{"city": "Zürich", "days": 2}'
CODER = (
    "<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>"
)

# vendor -> one call
FORMS = {
    "Hermes, Qwen 2.5 and 3": f'<tool_call>\n{{"name": "get_weather", '
    f'"arguments": {ARGUMENTS}}}\n</tool_call>',
    "Qwen 3 Coder": f"<tool_call>\n{CODER}\n</tool_call>",
    "Qwen 3 Coder, tag forgotten": CODER,
    "Seed-OSS": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Zürich</parameter>\n"
    "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>",
    "GLM 4.6": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "DeepSeek R1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    f"{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "DeepSeek V3.1": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "Llama 3": f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}<|eot_id|>',
    "Llama 3 with a tag": f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGUMENTS}}}<|eom_id|>',
    "Mistral Nemo": f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}, '
    '"id": "abcdefghi"}]</s>',
    "Mistral, newer": f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}",
    "Granite": f'<|tool_call|>[{{"name": "get_weather", "arguments": {ARGUMENTS}}}]<|end_of_text|>',
    "gpt-oss, as the template says it": " to=functions.get_weather<|channel|>commentary json<|message|>"
    f"{ARGUMENTS}<|call|>",
    "gpt-oss, as the model says it": "<|channel|>commentary to=functions.get_weather <|constrain|>json"
    f"<|message|>{ARGUMENTS}<|call|>",
    "Kimi K2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    "LFM 2": '<|tool_call_start|>[get_weather(city="Zürich", days=2)]<|tool_call_end|>',
    "arguments as a text": '<tool_call>{"name": "get_weather", "arguments": '
    '"{\\"city\\": \\"Zürich\\", \\"days\\": 2}"}</tool_call>',
    "the end cut off": f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}',
}


@pytest.mark.parametrize("vendor", FORMS)
def test_a_tool_call_is_parsed(vendor: str) -> None:
    assert parse_tool_calls(FORMS[vendor], TOOLS) == ParsedReply("", (CALL,))


@pytest.mark.parametrize(
    "text",
    [
        f'<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>\n'
        '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>',
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}, '
        '{"name": "get_time", "arguments": {}}]',
        f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}; {{"name": "get_time", "parameters": {{}}}}',
        '<|tool_call_start|>[get_weather(city="Zürich", days=2), get_time()]<|tool_call_end|>',
        f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]get_time[ARGS]{{}}</s>",
    ],
)
def test_several_tool_calls_keep_their_order(text: str) -> None:
    assert parse_tool_calls(text, TOOLS) == ParsedReply("", (CALL, ToolCall("get_time", {})))


def test_text_around_a_tool_call_is_kept() -> None:
    output = parse_tool_calls(f"I'll look.\n{FORMS['Qwen 3 Coder']}\n", TOOLS)
    assert output == ParsedReply("I'll look.", (CALL,))


@pytest.mark.parametrize(
    "text",
    [
        "It is warm.",
        '{"city": "Zürich"}',
        '{"name": "Ada", "parameters": {}}',
        '<tool_call>{"name": "delete_all", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "get_weather", "argum',
        "<|tool_call_start|>[get_weather(city=__import__('os').getcwd())]<|tool_call_end|>",
        "[TOOL_CALLS]",
        'As JSON: {"name": "get_time", "parameters": {}}',
    ],
)
def test_text_without_a_tool_call_stays_text(text: str) -> None:
    assert parse_tool_calls(text, TOOLS) == ParsedReply(text, ())


def test_arguments_are_converted_to_the_schema_types() -> None:
    text = CODER.replace("Zürich", "8000").replace("\n2\n", "\nsoon\n")
    assert parse_tool_calls(text, TOOLS).calls[0].arguments == {"city": "8000", "days": "soon"}


def test_without_tools_nothing_is_parsed_as_a_call() -> None:
    assert parse_tool_calls(FORMS["Hermes, Qwen 2.5 and 3"], []).calls == ()
