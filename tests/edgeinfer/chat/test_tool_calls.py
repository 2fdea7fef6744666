"""Tool calls in the formats of many templates; other text stays text."""

from typing import Any

import pytest

from edgeinfer.chat_templates.tool_call_stream import ToolCallStream
from edgeinfer.chat_templates.tool_calls import ParsedReply, ToolCall, parse_tool_calls, written_calls

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
    "Qwen 3.5, Nemotron 3, after reasoning": f"<tool_call>\n{CODER}\n</tool_call>\n",
    "Qwen 3 Coder, the function not closed": f"<tool_call>\n{CODER.removesuffix('</function>')}</tool_call>",
    "Granite 4, Falcon-H1": f'<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>',
    "Falcon-H1, a list": f'<tool_call>\n[{{"name": "get_weather", "arguments": {ARGUMENTS}}}]\n</tool_call>',
    "Python instead of JSON": "<tool_call>{'name': 'get_weather', 'arguments': {'city': 'Zürich', 'days': 2}}"
    "</tool_call>",
    "Jamba": f'<tool_calls>[\n    {{"name": "get_weather", "arguments": {ARGUMENTS}}}\n]</tool_calls>',
    "Nemotron Nano 2": f'<TOOLCALL>[{{"name": "get_weather", "arguments": {ARGUMENTS}}}]</TOOLCALL>',
    "LFM 2, as JSON": f'<|tool_call_start|>[{{"name": "get_weather", "arguments": {ARGUMENTS}}}]'
    "<|tool_call_end|>",
    "LFM 2": '<|tool_call_start|>[get_weather(city="Zürich", days=2)]<|tool_call_end|>',
    "arguments as a text": '<tool_call>{"name": "get_weather", "arguments": '
    '"{\\"city\\": \\"Zürich\\", \\"days\\": 2}"}</tool_call>',
    "MiniMax M2": '<minimax:tool_call>\n<invoke name="get_weather">\n'
    '<parameter name="city">Zürich</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
    "DeepSeek V3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" '
    'string="true">Zürich</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2'
    "</｜DSML｜parameter>\n"
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "Muse Glimmer": "<|start|>assistant to=get_weather<|message|><atem:function_calls>\n"
    '<atem:invoke name="get_weather">\n<atem:parameter name="city">Zürich</atem:parameter>\n'
    '<atem:parameter name="days">2</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
    "MiniCPM 5": '<function name="get_weather"><param name="city"><![CDATA[Zürich]]></param>'
    '<param name="days">2</param></function>',
    "Functionary 3.1": f"<function=get_weather>{ARGUMENTS}</function>",
    "Gemma 4": '<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:2}<tool_call|>',
    "Cohere": f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather",'
    f' "parameters": {ARGUMENTS}}}'
    "\n]<|END_ACTION|>",
    "Kimi K3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" '
    'type="string"<|sep|>Zürich<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>2'
    "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    "MiniMax M3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]'
    "<]minimax[>[<city>Zürich"
    "]<]minimax[>[</city>]<]minimax[>[<days>2]<]minimax[>[</days>]<]minimax[>[</invoke>\n]"
    "<]minimax[>[</tool_call>",
    "Hunyuan 3": "<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n"
    "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Zürich</arg_value:opensource>\n"
    "<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>2</arg_value:opensource>\n"
    "</tool_call:opensource>\n</tool_calls:opensource>",
    "Solar Open": "<|tool_calls|><|tool_call:begin|>abc<|tool_call:name|>get_weather<|tool_call:args|>"
    f"{ARGUMENTS}<|tool_call:end|>",
    "Llama 4": '<|python_start|>[get_weather(city="Zürich", days=2)]<|python_end|>',
    "Mistral Small 3.2": f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}",
    "Apertus": f'<|tools_prefix|>[{{"get_weather": {ARGUMENTS}}}]<|tools_suffix|>',
    "GigaChat 3": "<|message_sep|>\n\nfunction call<|role_sep|>\n"
    f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}<|message_sep|>',
    "GigaChat 3.1": f'<|function_call|>{{"name": "get_weather", "arguments": {ARGUMENTS}}}<|message_sep|>',
    "Phi 4 mini": f'<|tool_call|>[{{"name": "get_weather", "arguments": {ARGUMENTS}}}]<|/tool_call|>',
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
        f"<tool_call>\n{CODER}\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        f'<tool_calls>[{{"name": "get_weather", "arguments": {ARGUMENTS}}}, {{"name": "get_time", '
        '"arguments": {}}]</tool_calls>',
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Zürich</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="get_time">\n</invoke>\n'
        "</minimax:tool_call>",
        '<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:2}<tool_call|>'
        "<|tool_call>call:get_time{}<tool_call|>",
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
        "<tool_call><function=get_weather><parameter=city>Zürich",
        "<tool_call><function=get_weather>city: Zürich</function></tool_call>",
        "<function=get_weather><parameter=city>a</parameter> and more</function>",
        '<|tool_call_start|>[get_weather("Zürich")]<|tool_call_end|>',
        "<|tool_call_start|>[get_weather(city=b'Z')]<|tool_call_end|>",
        "<|tool_call_start|>[get_weather(**x)]<|tool_call_end|>",
        "<|tool_call_start|>[link](url)<|tool_call_end|>",
        '<tool_calls>[{"name": "get_weather", "arguments": {"days": NaN}}]</tool_calls>',
        '<think>Not <tool_call>{"name": "get_time", "arguments": {}}</tool_call></think>\n\nNo.',
        'As JSON: {"name": "get_time", "parameters": {}}',
        '<|tool_call>call:get_time{x:<|"|>a}<tool_call|>',
        "<|tool_call>call:get_time{x:[1}<tool_call|>",
        ']<]minimax[>[<invoke name="get_time">]<]minimax[>[<x>1]<]minimax[>[</y>]<]minimax[>[</invoke>',
        '<invoke name="get_time"><parameter name="x">1</parameter>',
    ],
)
def test_text_without_a_tool_call_stays_text(text: str) -> None:
    assert parse_tool_calls(text, TOOLS) == ParsedReply(text, ())


def test_arguments_are_converted_to_the_schema_types() -> None:
    text = CODER.replace("Zürich", "8000").replace("\n2\n", "\nsoon\n")
    assert parse_tool_calls(text, TOOLS).calls[0].arguments == {"city": "8000", "days": "soon"}


def test_without_tools_nothing_is_parsed_as_a_call() -> None:
    assert parse_tool_calls(FORMS["Hermes, Qwen 2.5 and 3"], []).calls == ()


def test_a_call_is_found_after_reasoning_that_mentions_one() -> None:
    reasoning = 'I use <tool_call>{"name": "get_time", "arguments": {}}</tool_call>.\n</think>'
    output = parse_tool_calls(f"{reasoning}\n\n<tool_call>\n{CODER}\n</tool_call>", TOOLS)
    assert output == ParsedReply(reasoning, (CALL,))
    assert parse_tool_calls(f"<think>{reasoning}\n{FORMS['LFM 2']}", TOOLS).calls == (CALL,)


VALUES: list[tuple[Any, str, Any]] = [
    ({"type": "string"}, "8000", "8000"),
    ({"type": "integer"}, "2", 2),
    ({"type": "integer"}, "2.0", 2),
    ({"type": "integer"}, "soon", "soon"),
    ({"type": "number"}, "2", 2),
    ({"type": "boolean"}, "true", True),
    ({"type": "boolean"}, "True", True),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "None", None),
    ({"type": ["string", "null"]}, "5", "5"),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", 5),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5.5", "5.5"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
    ({"type": "object"}, "{'a': (1, True)}", {"a": [1, True]}),
    ({"type": "array"}, "[1, none]", "[1, none]"),
    ({}, "NaN", "NaN"),
    ({}, "two\nlines", "two\nlines"),
    ({}, "{'a': 1}", "{'a': 1}"),
]


@pytest.mark.parametrize(("schema", "text", "expected"), VALUES)
def test_a_plain_value_has_the_type_that_its_schema_allows(schema: Any, text: str, expected: Any) -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}
    found = parse_tool_calls(f"<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>", [tool])
    value = found.calls[0].arguments["x"]
    assert (value, type(value)) == (expected, type(expected))


def test_marks_inside_a_value_belong_to_it() -> None:
    value = "<b>\n</parameter> x\n</function> y"
    text = f"<tool_call><function=get_weather><parameter=city>\n{value}\n</parameter></function></tool_call>"
    assert parse_tool_calls(text, TOOLS).calls == (ToolCall("get_weather", {"city": value}),)


NESTED: dict[str, Any] = {"title": "a, b: {1}", "tags": ["x", "3"], "place": {"lat": 1.5, "here": True}}
NESTED_TOOL: dict[str, Any] = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "place": {
                "type": "object",
                "properties": {"lat": {"type": "number"}, "here": {"type": "boolean"}},
            },
        },
    },
}


@pytest.mark.parametrize(
    "text",
    [
        '<|tool_call>call:add{place:{here:true,lat:1.5},tags:[<|"|>x<|"|>,<|"|>3<|"|>],title:'
        '<|"|>a, b: {1}<|"|>}'
        "<tool_call|>",
        ']<]minimax[>[<invoke name="add">]<]minimax[>[<title>a, b: {1}]<]minimax[>[</title>]'
        "<]minimax[>[<tags>"
        "]<]minimax[>[<item>x]<]minimax[>[</item>]<]minimax[>[<item>3]<]minimax[>[</item>]<]minimax[>[</tags>"
        "]<]minimax[>[<place>]<]minimax[>[<lat>1.5]<]minimax[>[</lat>]<]minimax[>[<here>true]"
        "<]minimax[>[</here>"
        "]<]minimax[>[</place>]<]minimax[>[</invoke>",
        '<｜DSML｜invoke name="add"><｜DSML｜parameter name="title" string="true">a, b: {1}'
        "</｜DSML｜parameter>"
        '<｜DSML｜parameter name="tags" string="false">["x", "3"]</｜DSML｜parameter>'
        '<｜DSML｜parameter name="place" string="false">{"lat": 1.5, "here": true}'
        "</｜DSML｜parameter></｜DSML｜invoke>",
    ],
)
def test_nested_arguments_are_read(text: str) -> None:
    assert parse_tool_calls(text, [NESTED_TOOL]).calls == (ToolCall("add", NESTED),)


def test_a_string_of_the_model_stays_one_without_a_schema() -> None:
    text = (
        '<｜DSML｜invoke name="get_time"><｜DSML｜parameter name="x" string="true">3'
        "</｜DSML｜parameter></｜DSML｜invoke>"
    )
    assert parse_tool_calls(text, TOOLS).calls == (ToolCall("get_time", {"x": "3"}),)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("True", True),
        ("null", None),
        ('{"on": true, "n": 3}', {"on": True, "n": 3}),
        ("['a', -1.5]", ["a", -1.5]),
        (r"'def f():\n\treturn \'x\''", "def f():\n\treturn 'x'"),
        ("'first\nsecond'", "first\nsecond"),
    ],
)
def test_arguments_of_python_calls_are_json(written: str, expected: Any) -> None:
    text = f"<|tool_call_start|>[get_time(x={written})]<|tool_call_end|>"
    assert parse_tool_calls(text, TOOLS).calls == (ToolCall("get_time", {"x": expected}),)


def test_a_dotted_name_is_a_name() -> None:
    text = "<|tool_call_start|>[Calendar.add(day='Mon')]<|tool_call_end|>"
    assert parse_tool_calls(text, [{"name": "Calendar.add"}]).calls == (
        ToolCall("Calendar.add", {"day": "Mon"}),
    )


def test_a_call_without_arguments_is_found() -> None:
    assert parse_tool_calls("<tool_call>get_time</tool_call>", TOOLS).calls == (ToolCall("get_time", {}),)


@pytest.mark.slow
def test_a_long_unfinished_call_is_read_quickly() -> None:
    text = "<tool_call><function=get_weather><parameter=city>" * 2000
    assert parse_tool_calls(text, TOOLS) == ParsedReply(text, ())


@pytest.mark.parametrize("who", FORMS)
def test_text_before_a_call_is_streamed_in_pieces_and_the_call_is_not(who: str) -> None:
    begins = not FORMS[who].startswith(("{", "<|python_tag|>", "<function", " to="))
    text = f"A <b> {{1}} 'if' a [x] <t.\n\n{FORMS[who]}" if begins else FORMS[who]
    reply, stream = parse_tool_calls(text, TOOLS), ToolCallStream()
    sent = "".join(stream.add(character, character) for character in text)
    assert sent == ("A <b> {1} 'if' a [x] <t." if begins else "")
    assert sent + stream.rest(reply, text) == reply.content


def test_special_tokens_end_the_streamed_text() -> None:
    stream = ToolCallStream()
    pieces = ["I", " look", "<|tool_call_start|>", "[get_time()]", "<|tool_call_end|>"]
    sent = [stream.add("" if piece.startswith("<|") else piece, piece) for piece in pieces]
    assert sent == ["I", " look", "", "", ""]
    assert stream.rest(parse_tool_calls("".join(pieces), TOOLS), "I look[get_time()]") == ""


def test_what_was_no_call_is_sent_at_the_end() -> None:
    text, stream = "Say <tool_call>nothing</tool_call> now. ", ToolCallStream()
    sent = "".join(stream.add(character, character) for character in text)
    assert sent == "Say"
    assert sent + stream.rest(parse_tool_calls(text, TOOLS), text) == text


MARKED = {name: text for name, text in FORMS.items() if name != "Llama 3"}


@pytest.mark.parametrize("text", MARKED.values(), ids=MARKED.keys())
def test_calls_of_unknown_tools_are_found_by_their_marks(text: str) -> None:
    (call,) = written_calls(text).calls
    assert call.name == "get_weather"
    assert {name: str(value) for name, value in call.arguments.items()} == {"city": "Zürich", "days": "2"}


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "get_weather", "parameters": {"city": "Zürich"}}',
        "Qwen writes `<tool_call>` before a call.",
        '```\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n```\nThis is how.',
        "<tool_call>no call</tool_call>",
        '<tool_call>{"name": "two words", "arguments": {}}</tool_call>',
        '<think><tool_call>{"name": "f", "arguments": {}}</tool_call></think>None is needed.',
    ],
)
def test_other_text_has_no_calls_of_unknown_tools(text: str) -> None:
    assert written_calls(text) == ParsedReply(text, ())


def test_text_before_and_after_a_call_stays() -> None:
    reply = written_calls(f"`<tool_call>` is next.\n{FORMS['Qwen 3 Coder']}")
    assert (reply.content, [call.name for call in reply.calls]) == ("`<tool_call>` is next.", ["get_weather"])
