"""`edgeinfer history`: list, search, export, name and delete saved chats."""

import json
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from typer import Argument, BadParameter, Exit, Option

from edgeinfer_tui.confirmation import Yes, confirm_removal
from edgeinfer_tui.failures import FAILED, say
from edgeinfer_tui.options.command_options import command
from edgeinfer_tui.output.columns import one_line, print_columns
from edgeinfer_tui.output.progress_line import shown_ago

if TYPE_CHECKING:
    from edgeinfer.history.store import ChatStore


class Format(StrEnum):
    """Export format of a chat."""

    md = "md"
    jsonl = "jsonl"


Chat = Annotated[
    str | None, Argument(help="A chat's name or number: print it. [dim]All are listed if left out[/]")
]
Search = Annotated[
    str | None, Option("--search", metavar="TEXT", help="Find messages that contain this text.")
]
Export = Annotated[
    Format | None, Option("--export", help="Print the chat as Markdown or JSON lines. [dim](md)[/]")
]
Delete = Annotated[bool, Option("--delete", help="Delete the chat; asks on a terminal.", show_default=False)]


@command("history")
def history(
    chat: Chat = None,
    search: Search = None,
    export: Export = None,
    name: Annotated[str | None, Option("--name", help="Give the chat a name.")] = None,
    delete: Delete = False,
    yes: Yes = False,
    as_json: Annotated[bool, Option("--json", help="The list in JSON.")] = False,
) -> None:
    """List saved chats, search them, print one of them, name it, or delete it.

    A search without results exits with 1, as grep does.

    [bold]Examples[/]

      edgeinfer history --search "fox"

      edgeinfer history 12 --export md > foxes.md

      edgeinfer history 12 --name foxes && edgeinfer run --session foxes
    """
    from edgeinfer.history.store import ChatStore

    if chat is None and (export or name or delete):
        raise BadParameter("--export, --name and --delete need a chat; `edgeinfer history` lists them")
    with ChatStore() as store:
        if search is not None:
            _search(store, search)
        elif chat is None:
            _list(store, as_json)
        elif name is not None:
            renamed = store.rename(store.chat(chat), name)
            say(f"{chat}: its name is {renamed.label} now")
        elif delete:
            _delete(store, chat, yes)
        else:
            _print(store, chat, export or Format.md)


def _list(store: "ChatStore", as_json: bool) -> None:
    chats = store.chats()
    if as_json:
        rows = [
            {
                "chat": chat.label,
                "id": chat.id,
                "title": chat.title,
                "model": chat.model,
                "messages": chat.messages,
                "created": chat.created,
                "changed": chat.changed,
            }
            for chat in chats
        ]
        print(json.dumps(rows, indent=2))
        return
    if not chats:
        say("no chats yet; `edgeinfer chat` begins one")
        return
    now = time.time()
    print_columns(
        ["CHAT", "CHANGED", "MESSAGES", "MODEL", "BEGINS"],
        [
            [chat.label, shown_ago(now - chat.changed), str(chat.messages), chat.model, one_line(chat.title)]
            for chat in chats
        ],
        right={2},
    )


def _delete(store: "ChatStore", label: str, yes: bool) -> None:
    chat = store.chat(label)
    if confirm_removal(f"Delete chat {chat.label}, {chat.messages} messages: {one_line(chat.title)}?", yes):
        store.delete(chat)
        say(f"{chat.label}: deleted, {chat.messages} messages")
    else:
        say(f"{chat.label}: kept")


def _search(store: "ChatStore", text: str) -> None:
    rows = [
        [
            hit.chat.label,
            shown_ago(time.time() - hit.message.created),
            hit.message.role,
            one_line(hit.excerpt),
        ]
        for hit in store.search(text)
    ]
    if not rows:
        say(f"{text!r}: found in no chat")
        raise Exit(FAILED)
    print_columns(["CHAT", "SAID", "BY", "TEXT"], rows)


def _print(store: "ChatStore", label: str, form: Format) -> None:
    from edgeinfer.history.export import as_json_lines, as_markdown

    chat = store.chat(label)
    write = as_markdown if form == Format.md else as_json_lines
    print(write(chat, store.branch(chat)), end="")
