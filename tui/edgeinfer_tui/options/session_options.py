"""The options of `run` that select the saved chat to continue."""

from typing import Annotated

from typer import Option

from edgeinfer_tui.options.options import PROMPT

Continue = Annotated[
    bool,
    Option("--continue", help="Go on with the last chat, on its model.", rich_help_panel=PROMPT),
]
Session = Annotated[
    str | None,
    Option(
        "--session",
        metavar="NAME",
        help="Go on with the chat of that name (or number), or begin it. `edgeinfer chats` lists them.",
        rich_help_panel=PROMPT,
    ),
]
Private = Annotated[
    bool, Option("--private", help="Keep nothing of this chat.", rich_help_panel=PROMPT, show_default=False)
]
