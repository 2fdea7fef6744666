"""`edgeinfer rm`: remove models from this disk."""

from typing import Annotated

import typer

from edgeinfer_tui.confirmation import Yes, may_remove
from edgeinfer_tui.failures import reporting, say
from edgeinfer_tui.options.completion import models_here
from edgeinfer_tui.output.byte_sizes import shown_bytes


@reporting
def rm(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Names of `edgeinfer list`.",
            show_default=False,
            autocompletion=models_here,
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and leave it.", show_default=False)
    ] = False,
    yes: Yes = False,
) -> None:
    """Remove models that were pulled or are in your models folder.

    Files of other programs (Ollama, LM Studio, the Hugging Face cache) are not
    removed: the message says how to remove them with those programs.

    [bold]Example[/]

      edgeinfer rm qwen3-8b:Q8_0
    """
    from edgeinfer.registry.removing import plan_removal, remove

    # All names are checked before the first removal: a misspelt name removes nothing.
    planned = [plan_removal(model) for model in models]
    for removal in planned:
        for other in removal.shared_with:
            say(f"{removal.name}: {other} uses the same file")
        if removal.hard_links:
            links = (
                "a hard link keeps" if removal.hard_links == 1 else f"{removal.hard_links} hard links keep"
            )
            say(f"{removal.name}: {links} its bytes on the disk")
        question = f"Remove {removal.name}, {shown_bytes(removal.freed_bytes)}?"
        if not dry_run and not may_remove(question, yes):
            say(f"{removal.name}: kept")
            continue
        if not dry_run:
            remove(removal)
        what = "would free" if dry_run else "removed, freed"
        say(f"{removal.name}: {what} {shown_bytes(removal.freed_bytes)}")
        for file in removal.files:
            print(file)
