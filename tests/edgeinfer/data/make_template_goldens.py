"""Writes templates/goldens.json: chats as Hugging Face transformers renders them with each template.

Run by hand where transformers and jinja2 >= 3.1.6 are installed: python make_template_goldens.py
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "templates"
NOW = "2025-03-07T09:05:00"

SYSTEM = {"role": "system", "content": "Be brief. Use <b>no</b> \"HTML\" & no 'quotes'."}
HELLO = {"role": "user", "content": "Hi — wer bist du? 你好 <|x|>"}
ANSWER = {"role": "assistant", "content": "I am a test.\n\nTwo lines.  "}
AGAIN = {"role": "user", "content": "  And then?\n"}
REASONING = {"role": "assistant", "content": "<think>\nHm, 1 < 2.\n</think>\n\nYes."}
LAST = {"role": "user", "content": "Thanks."}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter für einen Ort <now>",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "City & country"},
                "days": {"type": "integer", "enum": [1, 2, 3]},
            },
            "required": ["city"],
        },
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": 2}},
        }
    ],
}
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": '{"sky": "grau"}'}

CASES: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [HELLO]},
    "one turn, system": {"messages": [SYSTEM, HELLO]},
    "two turns": {"messages": [HELLO, ANSWER, AGAIN]},
    "two turns, system": {"messages": [SYSTEM, HELLO, ANSWER, AGAIN]},
    "three turns": {"messages": [HELLO, ANSWER, AGAIN, REASONING, LAST]},
    "three turns, system": {"messages": [SYSTEM, HELLO, ANSWER, AGAIN, REASONING, LAST]},
    "finished, system": {"messages": [SYSTEM, HELLO, ANSWER], "add_generation_prompt": False},
    "no thinking": {"messages": [HELLO], "variables": {"enable_thinking": False, "thinking": False}},
    "past reasoning kept": {
        "messages": [HELLO, {**ANSWER, "reasoning_content": "Let me see."}, LAST],
        "variables": {"preserve_thinking": True, "truncate_history_thinking": False},
    },
    "reasoning": {"messages": [HELLO, {**ANSWER, "reasoning_content": "Let me see."}, LAST]},
    "roles out of turn": {"messages": [HELLO, AGAIN, ANSWER, ANSWER]},
    "tools": {"messages": [SYSTEM, HELLO], "tools": [WEATHER]},
    "tool call": {"messages": [SYSTEM, HELLO, CALL, RESULT], "tools": [WEATHER]},
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def rendered(source: str, case: dict[str, Any]) -> str | dict[str, str]:
    from jinja2.exceptions import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, _ = render_jinja_template(
            conversations=[case["messages"]],
            tools=case.get("tools"),
            chat_template=source,
            add_generation_prompt=case.get("add_generation_prompt", True),
            **SPECIAL,
            **case.get("variables", {}),
        )
    except (TemplateError, TypeError, ValueError) as error:
        return {"error": str(error)}
    return str(texts[0])


def main() -> None:
    from transformers.utils import chat_template_utils

    class FixedClock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.fromisoformat(NOW)

    chat_template_utils.datetime = FixedClock
    goldens = {
        path.name: {name: rendered(path.read_text(encoding="utf-8"), case) for name, case in CASES.items()}
        for path in sorted(FOLDER.glob("*.jinja"))
    }
    content = {"now": NOW, "special": SPECIAL, "cases": CASES, "goldens": goldens}
    target = FOLDER / "goldens.json"
    target.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
