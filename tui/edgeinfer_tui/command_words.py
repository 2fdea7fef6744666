"""Slash commands of a chat: Tab completion, and corrections for unknown ones."""

from collections.abc import Callable, Mapping, Sequence

Complete = Callable[[str], Sequence[str]]
ALIASES = {"/bye": "/exit", "/quit": "/exit", "/?": "/help"}
"""Commands of Ollama -> the same here, in both chats."""


def completions(line: str, commands: Mapping[str, Complete | None]) -> list[str]:
    """Possible completions of a line; `commands`: word -> function that completes its argument."""
    word, blank, argument = line.partition(" ")
    if not blank:
        matches = [name for name in commands if name.startswith(word)] if word.startswith("/") else []
        return [f"{name} " if commands[name] else name for name in matches]
    complete = commands.get(word)
    return [f"{word} {value}" for value in complete(argument)] if complete else []


def common_beginning(lines: Sequence[str]) -> str:
    """Longest common prefix of all lines; "" if there are none."""
    first, last = min(lines, default=""), max(lines, default="")
    same = next((at for at, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), None)
    return first if same is None else first[:same]


def unknown_command_message(word: str, commands: Sequence[str]) -> str:
    """Error message for an unknown command."""
    from edgeinfer.registry.near_names import nearest

    near = nearest(word, commands)
    shown = word if len(word) <= 40 else f"{word[:37]}..."
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {' '.join(commands)}"
    return f"{shown}: no such command; {hint}"
