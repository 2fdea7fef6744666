"""`edgeinfer pull`: download a model."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from edgeinfer.options.load_options import EngineName, LocalEngine
from edgeinfer_tui import interrupts
from edgeinfer_tui.failures import say
from edgeinfer_tui.interrupts import INTERRUPTED
from edgeinfer_tui.options.arguments import models_to_pull
from edgeinfer_tui.options.command_options import command
from edgeinfer_tui.output.columns import shown_bytes
from edgeinfer_tui.output.transfer_progress import TransferProgress

if TYPE_CHECKING:
    from edgeinfer.download.pulling import PulledModel


@command("pull")
def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A name of `edgeinfer list --all`, with a quantization if you like, as qwen3-8b:Q6_K; "
            "hf:OWNER/NAME or hf:OWNER/NAME/FILE.gguf on Hugging Face; or an address.",
            show_default=False,
            autocompletion=models_to_pull,
        ),
    ],
    engine: EngineName | None = None,
) -> None:
    """Download a model. Resumes an interrupted download and verifies the sha256.

    Without a quantization, the best one that fits this machine and is fast
    enough is selected. The model's path is printed on stdout. Ctrl-C keeps
    partial data. Tokens (HF_TOKEN), the hub (HF_ENDPOINT) and proxies (https_proxy) are
    taken from the environment. A model that edgeinfer can't run is refused
    before its weights are downloaded, unless it is for --engine llama.cpp.

    [bold]Examples[/]

      edgeinfer pull qwen3-8b

      edgeinfer pull llama-3.2-3b:Q8_0

      edgeinfer pull hf:bartowski/gemma-2-2b-it-GGUF/gemma-2-2b-it-Q4_K_M.gguf
    """
    if engine == "openai":
        raise typer.BadParameter("--engine openai: its server has the models; drop it to download one")
    print(pull_model(model, engine or "edgeinfer").path)


def pull_model(name: str, engine: LocalEngine = "edgeinfer") -> "PulledModel":
    """Download a model for an engine, with progress on stderr.

    Raises:
        typer.Exit: Ctrl-C; partial data is kept, and a message is printed.
    """
    from edgeinfer.download.pulling import Pull, pull
    from edgeinfer.download.transfer import RetryPolicy, TransferCallbacks
    from edgeinfer.registry.registry import default_models_folder

    interrupts.raise_exception()
    with TransferProgress(sys.stderr) as progress:
        callbacks = TransferCallbacks(progress.update, progress.checking, progress.say)
        try:
            pulled = pull(name, Pull(default_models_folder(), callbacks, RetryPolicy(), engine=engine))
        except KeyboardInterrupt:
            progress.erase()
            say(f"stopped; partial data is kept, continue with: edgeinfer pull {name}")
            raise typer.Exit(INTERRUPTED) from None
    for line in _outcome(pulled):
        say(line)
    return pulled


def _outcome(pulled: "PulledModel") -> list[str]:
    """The downloaded files, and how they were verified."""
    from edgeinfer.model_config.support import support_of

    support = support_of(pulled.path)
    run = f"edgeinfer run {pulled.name}" + ("" if support.is_native else " --engine llama.cpp")
    size = shown_bytes(sum(file.path.stat().st_size for file in pulled.files))
    if all(file.existed for file in pulled.files):
        here = f"{pulled.name} is here already ({size})"
        if not support.is_native:
            return [f"{here}; it {support}"]
        return [f"{here}; name a quantization to fetch another"]
    lines = [f"{pulled.name} is here: {size}; run it with: {run}"]
    for file in pulled.files:
        if file.digest_source:
            lines.append(f"{file.path.name}: sha256 as {file.digest_source} says")
        elif not file.existed:
            lines.append(
                f"{file.path.name}: not verified, because no expected sha256 is known; it is {file.sha256}"
            )
    return [*lines, *_draft_warning(pulled.name)]


def _draft_warning(name: str) -> list[str]:
    """A hint to pull the draft model, if it isn't on this disk yet."""
    from edgeinfer.registry.registry import find_model, read_registry, split_quant

    entries = read_registry()
    known, _ = split_quant(name, entries)
    draft = entries[known].draft if known else None
    if draft not in entries or find_model(name).draft_path is not None:
        return []
    return [f"{draft} can draft for it, which may make it faster: edgeinfer pull {draft}"]
