"""Options of a chat template: reasoning on or off, its effort, and any variable that it reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from edgeinfer.errors import SettingError

Thinking = Literal["on", "off", "low", "medium", "high"]
Tool = Mapping[str, Any]
"""A function in OpenAI's format."""
EFFORTS = ("low", "medium", "high")
SWITCHES = ("enable_thinking", "thinking")
"""Variables with which templates turn reasoning on or off (Qwen3, GLM, SmolLM3; DeepSeek, Granite)."""
EFFORT = "reasoning_effort"
BUDGET = "thinking_budget"
"""Maximum reasoning tokens (Seed-OSS); 0 turns reasoning off."""
KEEPS_REASONING = {
    "preserve_thinking": True,
    "keep_past_thinking": True,
    "truncate_history_thinking": False,
    "clear_thinking": False,
}
"""Variables with which templates keep the reasoning of earlier responses, and their values for that (Qwen 3.6
and LFM2.5; LFM2.5; Nemotron 3; GLM).
"""
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "strftime_now"}
)


@dataclass(frozen=True)
class TemplateOptions:
    """How messages become a prompt.

    `thinking`: None uses the template's default. `args`: template variables by name. `tools`: the functions
    that the model may call. `constrained`: the output follows a schema or grammar, so a reasoning block that
    the template opens is closed at once.
    """

    thinking: Thinking | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Tool] = ()
    constrained: bool = False

    def __post_init__(self) -> None:
        if self.thinking is not None and self.thinking not in get_args(Thinking):
            allowed = ", ".join(get_args(Thinking))
            raise SettingError(f"thinking: saw {str(self.thinking)[:40]!r}, wanted one of {allowed}, or None")
        if not isinstance(self.args, Mapping) or not all(isinstance(name, str) for name in self.args):
            raise SettingError(
                f"template_args: saw {str(self.args)[:40]!r}, wanted template variables by name"
            )
        if taken := RESERVED & self.args.keys():
            raise SettingError(f"template_args: {min(taken)!r} is set by edgeinfer; leave it out")

    def over(self, defaults: "TemplateOptions") -> "TemplateOptions":
        """These options, with unset ones taken from `defaults`."""
        args = {**defaults.args, **self.args}
        return replace(self, thinking=self.thinking or defaults.thinking, args=args)

    @property
    def keeps_reasoning(self) -> bool:
        """Whether a variable asks the template to keep the reasoning of earlier responses."""
        return any(self.args.get(name) is value for name, value in KEEPS_REASONING.items())

    def variables(self, known: frozenset[str]) -> dict[str, Any]:
        """The template's variables. `known`: those that the template reads.

        Raises:
            SettingError: the template has no such variable, or doesn't support the value of `thinking`.
        """
        for name in self.args:
            if name not in known:
                shown = ", ".join(sorted(known - RESERVED)) or "none"
                raise SettingError(
                    f"template_args: the chat template doesn't read {name[:40]!r}; it reads: {shown}"
                )
        if self.thinking is None:
            return dict(self.args)
        return {**thinking_variables(self.thinking, known), **self.args}


DEFAULTS = TemplateOptions()
"""The template's defaults."""


def thinking_variables(thinking: Thinking, known: frozenset[str]) -> dict[str, Any]:
    """Template variables for a reasoning level. Raises `SettingError` if the template doesn't support it."""
    switches = [name for name in SWITCHES if name in known]
    if EFFORT in known and thinking in EFFORTS:
        return {EFFORT: thinking} | dict.fromkeys(switches, True)
    if switches and thinking in ("on", "off"):
        return dict.fromkeys(switches, thinking == "on")
    if BUDGET in known and thinking in ("on", "off"):
        return {BUDGET: -1 if thinking == "on" else 0}
    raise SettingError(f"thinking: saw {thinking!r}, but {_levels(known)}")


def thinking_levels(known: frozenset[str]) -> tuple[Thinking, ...]:
    """The reasoning levels of a template with these variables."""
    switchable = BUDGET in known or any(name in known for name in SWITCHES)
    levels: tuple[Thinking, ...] = ("on", "off") if switchable else ()
    return levels + (("low", "medium", "high") if EFFORT in known else ())


def _levels(known: frozenset[str]) -> str:
    levels = thinking_levels(known)
    if not levels:
        return "the model's chat template has no setting for it"
    return f"the model's chat template supports {', '.join(levels)}"
