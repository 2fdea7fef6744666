"""Reasoning and other variables of chat templates."""

from pathlib import Path
from typing import Any

import pytest

from edgeinfer.chat_templates.chat_format import ChatFormat
from edgeinfer.chat_templates.template_options import TemplateOptions, Thinking, thinking_levels
from edgeinfer.errors import SettingError

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
LEVELS: dict[str, tuple[Thinking, ...]] = {
    "Qwen-Qwen3-0.6B": ("on", "off"),
    "GLM-4.6": ("on", "off"),
    "HuggingFaceTB-SmolLM3-3B": ("on", "off"),
    "ByteDance-Seed-OSS": ("on", "off"),
    "deepseek-ai-DeepSeek-V3.1": ("on", "off"),
    "ibm-granite-granite-3.3-2B-Instruct": ("on", "off"),
    "Qwen3.5-4B": ("on", "off"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("on", "off"),
    "LFM2.5-8B-A1B": (),
    "ibm-granite-granite-4.0": (),
    "openai-gpt-oss-120b": ("low", "medium", "high"),
    "google-gemma-2-2b-it": (),
}


@pytest.mark.parametrize("name", LEVELS)
def test_reasoning_levels_come_from_the_template(name: str) -> None:
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    chat_format = ChatFormat(source, "<s>", "</s>")
    known = chat_format.variables()
    assert thinking_levels(known) == LEVELS[name]
    rendered = {
        level: chat_format.render(
            [{"role": "user", "content": "Hi"}], **TemplateOptions(level).variables(known)
        )
        for level in LEVELS[name]
    }
    assert len(set(rendered.values())) == len(rendered)


@pytest.mark.parametrize(
    ("name", "variable", "changed"),
    [
        ("LFM2.5-8B-A1B", "preserve_thinking", True),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "truncate_history_thinking", False),
        ("openai-gpt-oss-120b", "model_identity", "You are a test."),
    ],
)
def test_other_variables_change_the_prompt(name: str, variable: str, changed: Any) -> None:
    chat_format = ChatFormat((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"), "<s>", "</s>")
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."},
        {"role": "user", "content": "Why?"},
    ]
    variables = TemplateOptions(None, {variable: changed}).variables(chat_format.variables())
    assert chat_format.render(messages, **variables) != chat_format.render(messages)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"thinking": "maybe"}, "'maybe', wanted one of on, off, low, medium, high"),
        ({"thinking": "low"}, "saw 'low', but the model's chat template supports on, off"),
        ({"args": {"foo": 1}}, "doesn't read 'foo'; it reads: enable_thinking"),
        ({"args": {"messages": []}}, "'messages' is set by edgeinfer"),
        ({"args": 5}, "saw '5', wanted template variables by name"),
    ],
)
def test_options_the_template_lacks_are_refused(options: dict[str, Any], expected: str) -> None:
    known = ChatFormat("{% if enable_thinking %}{{ messages }}{% endif %}").variables()
    with pytest.raises(SettingError, match=expected):
        TemplateOptions(**options).variables(known)


def test_a_template_without_reasoning_is_reported() -> None:
    with pytest.raises(SettingError, match="has no setting for it"):
        TemplateOptions("on").variables(ChatFormat("{{ messages }}").variables())


def test_a_request_overrides_defaults() -> None:
    defaults = TemplateOptions("off", {"a": 1, "b": 2})
    options = TemplateOptions("on", {"b": 3}).over(defaults)
    assert (options.thinking, options.args) == ("on", {"a": 1, "b": 3})
    assert TemplateOptions().over(defaults).thinking == "off"
