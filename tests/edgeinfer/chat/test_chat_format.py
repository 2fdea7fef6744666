"""What a chat format offers templates, reads from files, and reports when a template fails."""

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import pytest

from edgeinfer.chat_templates.chat_format import ChatFormat
from edgeinfer.engine.protocols import TextDecoder
from edgeinfer.errors import ChatTemplateError

HELLO = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "look"}}]


class FewTokens:
    """A tokenizer of four tokens."""

    bos_id: int | None = 0
    eos_id: int | None = 1
    end_ids = frozenset({1})
    vocabulary_size = 4
    add_bos = False
    control_texts: tuple[str, ...] = ()

    def encode(
        self,
        text: str,
        *,
        bos: bool = False,
        special: bool = False,
        restore: Callable[[str], str] | None = None,
    ) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        return [b"<s>", b"</s>", b"<pad>", b"<unk>"][token_id]

    def is_control(self, token_id: int) -> bool:
        raise NotImplementedError

    def stream_decoder(self) -> TextDecoder:
        raise NotImplementedError


def render(source: str, **variables: Any) -> str:
    return ChatFormat(source).render(HELLO, **variables)


def failure(source: str, **variables: Any) -> str:
    with pytest.raises(ChatTemplateError) as caught:
        render(source, **variables)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_special_tokens_are_available_by_name() -> None:
    source = "{{ bos_token }}{{ eos_token }}{{ pad_token }}|{{ unk_token }}"
    assert ChatFormat(source, "<s>", "</s>").render(HELLO) == "<s></s>|"
    metadata = {"tokenizer.chat_template": source, "tokenizer.ggml.padding_token_id": 2}
    assert ChatFormat.from_metadata(metadata, FewTokens()).render(HELLO) == "<s></s><pad>|"


def test_an_id_beyond_the_vocabulary_gives_no_text() -> None:
    metadata = {"tokenizer.chat_template": "[{{ pad_token }}]", "tokenizer.ggml.padding_token_id": 99}
    assert ChatFormat.from_metadata(metadata, FewTokens()).render(HELLO) == "[]"


def test_the_generation_prompt_can_be_omitted() -> None:
    source = "{% if add_generation_prompt %}>{% endif %}"
    assert render(source) == ">"
    assert render(source, add_generation_prompt=False) == ""


def test_variables_reach_the_template_and_take_precedence() -> None:
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert ChatFormat("{{ bos_token }}", "<s>").render(HELLO, bos_token="<b>") == "<b>"


def test_block_tags_are_trimmed_with_their_line() -> None:
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"


def test_loops_can_break_and_continue() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i > 3 %}{% break %}{% endif %}"
    )
    assert render(source + "{{ i }}{% endfor %}") == "023"


def test_assistant_text_can_be_marked_as_generation() -> None:
    assert render("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abHic"


def test_json_is_not_escaped_for_html_and_accepts_options() -> None:
    value = {"b": "<ü'\">", "a": [1, None, True]}
    assert render("{{ value|tojson }}", value=value) == json.dumps(value, ensure_ascii=False)
    indented = json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True)
    assert render("{{ value|tojson(indent=2, sort_keys=true) }}", value=value) == indented
    packed = json.dumps(value, separators=(",", ":"))
    assert render("{{ value|tojson(ensure_ascii=true, separators=(',', ':')) }}", value=value) == packed


def test_strftime_now_is_available() -> None:
    chat_format = ChatFormat("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert chat_format.render(HELLO) == "26 Jul 2024"


def test_reasoning_is_available_under_both_names() -> None:
    chat_format = ChatFormat("{{ messages[0].thinking }}|{{ messages[0].reasoning_content }}")
    for key in ("thinking", "reasoning_content"):
        assert chat_format.render([{"role": "assistant", "content": "", key: "Hm"}]) == "Hm|Hm"


def test_only_plain_data_reaches_a_template() -> None:
    class Text(str):
        def shout(self) -> str:
            return "!"

    assert render("{{ value }}", value=object()) == "<object>"
    assert failure("{{ value.shout() }}", value=Text("a")).startswith("chat template, line 1:")
    assert render("{{ value }}", value=(1, 2)) == "[1, 2]"


def test_a_template_is_compiled_when_it_is_used() -> None:
    broken = ChatFormat("{% if %}")
    assert broken.template_source == "{% if %}"
    with pytest.raises(ChatTemplateError):
        broken.render(HELLO)


def test_a_file_without_a_template_names_the_option_to_set() -> None:
    chat_format = ChatFormat.from_metadata({}, FewTokens())
    assert chat_format.template_source is None
    with pytest.raises(ChatTemplateError, match=r"tokenizer\.chat_template is missing.*\(chat_template=\)"):
        chat_format.render(HELLO)


def test_named_templates_are_selected_by_name() -> None:
    metadata = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.rag": "with documents"}
    assert ChatFormat.from_metadata(metadata, FewTokens(), name="rag").render(HELLO) == "with documents"
    assert ChatFormat.from_metadata(metadata, FewTokens(), name="default").render(HELLO) == "plain"
    with pytest.raises(ChatTemplateError, match=r"chat_template\.story is missing; .*: default, rag"):
        ChatFormat.from_metadata(metadata, FewTokens(), name="story")


def test_the_tool_template_is_selected_if_there_are_tools() -> None:
    metadata = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    chat_format = ChatFormat.from_metadata(metadata, FewTokens())
    assert chat_format.render(HELLO) == "plain"
    assert chat_format.render(HELLO, tools=TOOLS) == "tools"
    assert (
        ChatFormat.from_metadata(metadata, FewTokens(), name="default").render(HELLO, tools=TOOLS) == "plain"
    )


def test_the_only_template_gets_the_tools_too() -> None:
    assert ChatFormat("{{ tools[0].function.name }}").render(HELLO, tools=TOOLS) == "look"


def test_a_syntax_error_is_reported_with_its_line() -> None:
    message = failure("one\ntwo\n  {% if %}\n")
    assert message.startswith("chat template, line 3: Expected an expression")
    assert message.endswith("in: {% if %}")


def test_an_exception_of_the_template_is_reported_with_its_line() -> None:
    message = failure("{{ 1 }}\n{{ raise_exception('No system\nrole') }}")
    assert message == "chat template, line 2: No system role in: {{ raise_exception('No system"


def test_an_undefined_variable_is_named() -> None:
    assert failure("\n{{ nobody.name.first }}").startswith(
        "chat template, line 2: 'nobody' is undefined in: "
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ 'a' + 1 }}", "TypeError: can only concatenate str"),
        ("{{ none|length }}", "TypeError: object of type 'NoneType' has no len()"),
        ("{{ 1|nope }}", "No filter named 'nope'"),
        ("{% nope %}", "Encountered unknown tag 'nope'"),
        ("{% include 'x' %}", "TypeError: no loader for this environment"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_other_template_errors_are_one_line(source: str, message: str) -> None:
    assert message in failure(source)


def test_a_long_line_is_cut_in_the_message() -> None:
    assert len(failure("{{ raise_exception('x') }}" + "y" * 10_000)) < 300
