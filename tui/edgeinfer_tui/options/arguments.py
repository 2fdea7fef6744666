"""Arguments and options that several commands declare, and the shell completion of model names."""

from typing import Annotated

from typer import Argument, Option


def models_here(incomplete: str) -> list[str]:
    """Names of models on this machine that start with the text."""
    from edgeinfer.registry.registry import list_models

    return _beginning(incomplete, [model.name for model in list_models()])


def models_to_pull(incomplete: str) -> list[str]:
    """Names in the model registry; after a colon, their quantizations."""
    from edgeinfer.registry.registry import read_registry

    entries = [entry for entry in read_registry().values() if entry.repository or entry.url]
    name = incomplete.partition(":")[0]
    quants = [entry.name_of(quant) for entry in entries if entry.name == name for quant in entry.quants]
    return _beginning(incomplete, [*(entry.name for entry in entries), *quants])


def _beginning(incomplete: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


ModelArgument = Annotated[
    str | None,
    Argument(
        help="A name from `edgeinfer list`, or a .gguf file. [dim](tiny)[/]",
        show_default=False,
        autocompletion=models_here,
    ),
]
PromptArgument = Annotated[
    str | None,
    Argument(help="The prompt. [dim](standard input if it is piped, else a chat)[/]", show_default=False),
]
AsJson = Annotated[bool, Option("--json", help="Print JSON for a program to read.")]
