"""The formats in which models write tool calls, one row each; the first that finds a call is used."""

import re
from dataclasses import dataclass

from edgeinfer.chat_templates import call_readers
from edgeinfer.chat_templates.call_readers import Reader


@dataclass(frozen=True)
class CallFormat:
    """`models` that use it, the `marks` that begin a call, the `pattern` of one, and its reader."""

    models: str
    marks: tuple[str, ...]
    pattern: re.Pattern[str]
    read: Reader


def _format(models: str, marks: tuple[str, ...], pattern: str, read: Reader) -> CallFormat:
    return CallFormat(models, marks, re.compile(pattern, re.DOTALL), read)


_NAME = r"(?P<name>[\w.\-]+)"
_JSON_TO = r"(?P<json>.*?)"
_TOOL_CALL_END = r"</(?:seed:)?tool_call>"
_PARAMETER = (
    r"<parameter=[\w.\-]+>[^<]*+"
    rf"(?:<(?!/parameter>\s*(?:<parameter=|</function>|{_TOOL_CALL_END}))[^<]*+)*+</parameter>"
)
"""A parameter's value ends at the mark before the next parameter or before the end of the call."""
_PREFIX = r"(?P<prefix>｜DSML｜|atem:|)"
_KIMI = r"<\|{}\|>{}<\|sep\|>"
_TAG = re.escape(call_readers.MINIMAX_TAG)

CALL_FORMATS = (
    _format(
        "Qwen 3 Coder, Qwen 3.5, Nemotron 3, Seed-OSS",
        ("<tool_call>", "<seed:tool_call>", "<function="),
        rf"(?:<(?:seed:)?tool_call>\s*)?<function={_NAME}>(?P<rest>\s*+(?:{_PARAMETER}\s*+)*+)"
        rf"(?:</function>(?:\s*{_TOOL_CALL_END})?|{_TOOL_CALL_END})",
        call_readers.text_parameters(
            r"<parameter=(?P<key>[\w.\-]+)>(?P<value>.*?)</parameter>(?=\s*(?:<parameter=|\Z))"
        ),
    ),
    _format(
        "GLM 4, Hunyuan 3",
        ("<tool_call>", "<tool_call:", "<tool_calls:"),
        rf"<tool_call(?P<suffix>:\w+|)>\s*{_NAME}\s*(?:<tool_sep(?P=suffix)>\s*)?"
        r"(?P<rest><arg_key(?P=suffix)>.*?)?</tool_call(?P=suffix)>",
        call_readers.text_parameters(
            r"<arg_key(?P<suffix>:\w+|)>(?P<key>.*?)</arg_key(?P=suffix)>\s*"
            r"<arg_value(?P=suffix)>(?P<value>.*?)</arg_value(?P=suffix)>"
        ),
    ),
    _format(
        "Hermes, Qwen, SmolLM, Granite 4, Falcon-H1",
        ("<tool_call>",),
        rf"<tool_call>{_JSON_TO}(?:</tool_call>|$)",
        call_readers.json_calls,
    ),
    _format(
        "MiniMax M3",
        (call_readers.MINIMAX_TAG,),
        rf'{_TAG}<invoke name="{_NAME}">(?P<rest>.*?){_TAG}</invoke>',
        call_readers.minimax_call,
    ),
    _format(
        "MiniMax M2, DeepSeek V3.2 and V4, Muse Glimmer",
        (
            *("<minimax:tool_call>", "<｜DSML｜", "<atem:function_calls>", "<|start|>assistant to="),
            *("<invoke name=", "<atem:invoke"),
        ),
        r"(?:(?:<\|start\|>assistant)? to=[\w.\-]+<\|message\|>\s*(?:<atem:function_calls>\s*)?)?"
        rf'(?<!{_TAG})<{_PREFIX}invoke name="{_NAME}">(?P<rest>.*?)</(?P=prefix)invoke>',
        call_readers.text_parameters(
            rf'<{_PREFIX}parameter name="(?P<key>[^"]+)"(?: string="(?P<type>\w+)")?>'
            r"(?P<value>.*?)</(?P=prefix)parameter>(?=\s*(?:<(?P=prefix)parameter |\Z))"
        ),
    ),
    _format(
        "MiniCPM 5",
        ("<function name=",),
        rf'<function name="{_NAME}">(?P<rest>.*?)</function>',
        call_readers.text_parameters(
            r'<param name="(?P<key>[^"]+)">(?P<value>.*?)</param>(?=\s*(?:<param |\Z))'
        ),
    ),
    _format(
        "Functionary 3.1, Llama 3 with own functions",
        ("<function=",),
        rf"<function={_NAME}>(?P<json>\s*\{{.*?\}}\s*)(?:</function>|$)",
        call_readers.named_json,
    ),
    _format(
        "Gemma 4",
        ("<|tool_call>",),
        rf"<\|tool_call>\s*call:{_NAME}(?P<rest>\{{.*?)(?:<tool_call\|>|$)",
        call_readers.gemma_call,
    ),
    _format(
        "Cohere",
        ("<|START_ACTION|>",),
        rf"<\|START_ACTION\|>{_JSON_TO}(?:<\|END_ACTION\|>|$)",
        call_readers.json_calls,
    ),
    _format(
        "Kimi K3",
        ("<|open|>tools", "<|open|>call"),
        _KIMI.format("open", rf'call tool="{_NAME}"[^<]*') + "(?P<rest>.*?)" + _KIMI.format("close", "call"),
        call_readers.text_parameters(
            _KIMI.format("open", r'argument key="(?P<key>[^"]+)"(?: type="(?P<type>\w+)")?')
            + "(?P<value>.*?)"
            + _KIMI.format("close", "argument")
        ),
    ),
    _format(
        "DeepSeek R1, V3, V3.1",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        rf"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?{_NAME}(?:<｜tool▁sep｜>|\s*```json)"
        rf"{_JSON_TO}(?:\s*```\s*)?(?:<｜tool▁call▁end｜>|$)",
        call_readers.named_json,
    ),
    _format(
        "gpt-oss",
        ("to=functions.", "<|channel|>"),
        rf"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)?\s*to=functions\.{_NAME}[^{{]*<\|message\|>"
        rf"{_JSON_TO}(?:<\|call\|>|$)",
        call_readers.named_json,
    ),
    _format(
        "Kimi K2",
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        rf"<\|tool_call_begin\|>\s*functions\.{_NAME}:\d+\s*<\|tool_call_argument_begin\|>"
        rf"{_JSON_TO}(?:<\|tool_call_end\|>|$)",
        call_readers.named_json,
    ),
    _format(
        "Solar Open",
        ("<|tool_calls|>", "<|tool_call:begin|>"),
        rf"<\|tool_call:begin\|>\w*<\|tool_call:name\|>{_NAME}<\|tool_call:args\|>"
        rf"{_JSON_TO}(?:<\|tool_call:end\|>|$)",
        call_readers.named_json,
    ),
    _format(
        "Jamba, Nemotron Nano 2",
        ("<tool_calls>", "<TOOLCALL>"),
        rf"<(?P<tag>tool_calls|TOOLCALL)>{_JSON_TO}(?:</(?P=tag)>|$)",
        call_readers.json_calls,
    ),
    _format(
        "LFM 2, Llama 4",
        ("<|tool_call_start|>", "<|python_start|>"),
        r"<\|(?:tool_call|python)_start\|>(?P<python>.*?)(?:<\|(?:tool_call|python)_end\|>|$)",
        call_readers.python_calls,
    ),
    _format(
        "Mistral, newer",
        ("[TOOL_CALLS]",),
        rf"\[TOOL_CALLS\]\s*{_NAME}(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?{_JSON_TO}"
        r"(?:(?=\[TOOL_CALLS\])|</s>|$)",
        call_readers.named_json,
    ),
    _format(
        "Mistral, older",
        ("[TOOL_CALLS]",),
        rf"\[TOOL_CALLS\]{_JSON_TO}(?:</s>|$)",
        call_readers.json_calls,
    ),
    _format(
        "Apertus",
        ("<|tools_prefix|>",),
        rf"<\|tools_prefix\|>{_JSON_TO}(?:<\|tools_suffix\|>|$)",
        call_readers.json_by_name,
    ),
    _format(
        "GigaChat 3",
        ("<|function_call|>", "<|message_sep|>", "function call<|role_sep|>"),
        rf"(?:<\|message_sep\|>\s*)?(?:function call<\|role_sep\|>|<\|function_call\|>){_JSON_TO}"
        r"(?:<\|message_sep\|>|$)",
        call_readers.json_calls,
    ),
    _format(
        "Granite 3, Phi 4 mini",
        ("<|tool_call|>",),
        rf"<\|tool_call\|>{_JSON_TO}(?:<\|/tool_call\|>|<\|end_of_text\|>|$)",
        call_readers.json_calls,
    ),
    _format(
        "Llama 3: only the call",
        ("<|python_tag|>",),
        r"^\s*(?:<\|python_tag\|>)?\s*(?P<json>[\[{].*?)\s*(?:<\|e\w+_id\|>\s*)*$",
        call_readers.json_calls,
    ),
)
CALL_MARKS = tuple(dict.fromkeys(mark for form in CALL_FORMATS for mark in form.marks))
"""A tool call begins with one of these, or the whole response is JSON."""
WRAPPERS = re.compile(
    r"<｜tool▁calls▁(?:begin|end)｜>|<\|tool_calls_section_(?:begin|end)\|>|<\|(?:open|close)\|>tools<\|sep\|>"
    r"|</?(?:minimax:tool_call|tool_calls:\w+|｜DSML｜(?:function|tool)_calls|atem:function_calls)>"
    r"|<\|eom\|>"
    rf"|<\|tool_calls\|>|{_TAG}</?tool_call>"
)
"""Marks around one or several calls, removed from the text of a response with calls."""
