"""`edgeinfer profile`: how often a model uses each neuron."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import BadParameter, Option

from edgeinfer_tui import interrupts
from edgeinfer_tui.failures import resumable, say
from edgeinfer_tui.options import arguments
from edgeinfer_tui.options.command_options import command
from edgeinfer_tui.output.columns import print_columns, shown_bytes
from edgeinfer_tui.output.labelled_progress import LabelledProgress
from edgeinfer_tui.text_files import text_of

if TYPE_CHECKING:
    from edgeinfer.profiling.profiling import Profiling
    from edgeinfer_offload.runtime.concentration import Coverage

Texts = Annotated[
    list[Path] | None,
    Option(
        "--text",
        metavar="FILE",
        help="A text in UTF-8; may be repeated. [dim]Text that the model generates if left out[/]",
        exists=True,
        dir_okay=False,
    ),
]
Tokens = Annotated[int, Option("--tokens", min=64, help="Maximum tokens to process.")]
Predictor = Annotated[
    bool, Option("--predictor", help="Train predictors of the active neurons too (ReLU families).")
]
Rank = Annotated[
    int | None,
    Option("--rank", min=32, help="Rank of the predictors. [dim]The cheapest in bytes if left out[/]"),
]

Imatrix = Annotated[
    Path | None,
    Option(
        "--imatrix",
        metavar="TEXT",
        help="Write an importance matrix from this text in UTF-8 to OUT instead (quantize --imatrix).",
        exists=True,
        dir_okay=False,
    ),
]
Out = Annotated[
    Path | None, Option("--output", "-o", metavar="OUT", help="The .gguf file of the importance matrix.")
]


@command("profile")
def profile(
    model: arguments.ModelArgument = None,
    text: Texts = None,
    tokens: Tokens = 8192,
    predictor: Predictor = False,
    rank: Rank = None,
    imatrix: Imatrix = None,
    output: Out = None,
    remove: Annotated[bool, Option("--remove", help="Delete the model's saved counts instead.")] = False,
    threads: int | None = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Count how often a model uses each neuron (or expert) over a text; save the counts next to the model.

    The report shows what share of the activations in the text's second half
    belongs to the neurons that were hottest in the first half; random neurons would
    reach only their own share. The saved counts decide whether a ReLU model's feed-forward
    reads active neurons only (`run --sparse`), and the order of `quantize --hot-first`.

    [bold]Examples[/]

      edgeinfer profile tiny

      edgeinfer profile model.gguf --text book.txt --text news.txt --predictor

      edgeinfer profile tiny --json | jq .overall

      edgeinfer profile tiny --remove

      edgeinfer profile model-F16.gguf --imatrix book.txt -o imatrix.gguf
    """
    if (imatrix is None) != (output is None):
        raise BadParameter("--imatrix TEXT and -o OUT belong together; saw one of them only")
    if remove:
        _remove(model)
        return
    if imatrix is not None and output is not None:
        _write_importance(model, imatrix, output, tokens)
        return
    texts = [text_of(path) for path in text or []]
    profiling = _profiled(model, texts, tokens=tokens, predictor=predictor, rank=rank, threads=threads)
    if as_json:
        print(json.dumps(profile_report(profiling), indent=2, allow_nan=False))
    else:
        _print_report(profiling)
        say(f"saved in {profiling.path}")


def _remove(model: str | None) -> None:
    """Delete the profile of a model, and print its path."""
    from edgeinfer.registry.registry import find_model
    from edgeinfer.user_folders import user_folder
    from edgeinfer_offload.runtime.activity_profile import remove_profile

    found = find_model(model)
    path = remove_profile(found.path, user_folder("data"))
    say(f"removed {path}" if path else f"{found.name} has no profile")


def _write_importance(model: str | None, text: Path, output: Path, tokens: int) -> None:
    """Write an importance matrix, with a progress line."""
    from edgeinfer.calibration.importance import measure_importance

    interrupts.raise_exception()
    with resumable("edgeinfer profile"), LabelledProgress(time_left=True) as progress:
        count = measure_importance(
            model,
            text_of(text, "--imatrix"),
            output,
            tokens=tokens,
            dataset=text.name,
            report=progress.update,
        )
    say(f"wrote the importance of {count} tensors to {output}")


def _profiled(model: str | None, texts: list[str], **settings: Any) -> "Profiling":
    """`edgeinfer.profile` with a progress line; settings that are None keep their defaults."""
    from edgeinfer.profiling.profiling import profile as profile_model

    given = {name: value for name, value in settings.items() if value is not None}
    interrupts.raise_exception()
    with LabelledProgress(time_left=True) as progress:
        return profile_model(model, texts, **given, report=progress.update, **progress.loading())


def profile_report(profiling: "Profiling") -> dict[str, Any]:
    """The report as JSON values."""
    from edgeinfer_offload.runtime.concentration import SHARES

    def covered(part: "Coverage") -> dict[str, Any]:
        return {
            "units": part.granules,
            "active_share": part.active,
            "covered_by_hottest": {
                f"{share:.0%}": value for share, value in zip(SHARES, part.covered, strict=True)
            },
            "hot_set_recommended": part.beats_uniform,
        }

    layers = [covered(layer) for layer in profiling.layers]
    for layer, trained in zip(layers, profiling.predictors, strict=False):
        layer["predictor"] = {
            "rank": trained.predictor.rank,
            "bytes": trained.predictor.nbytes,
            "recall": trained.recall,
            "named_share": trained.named,
        }
    return {
        "path": str(profiling.path),
        "model_hash": profiling.profile.model_hash,
        "tokens": list(profiling.profile.tokens),
        "active_is": profiling.profile.rule,
        "overall": covered(profiling.overall),
        "active_share_in_experts": profiling.in_experts,
        "layers": layers,
    }


def _print_report(profiling: "Profiling") -> None:
    from edgeinfer_offload.runtime.concentration import SHARES

    head = ["layer", "units", "active", *(f"hottest {share:.0%}" for share in SHARES), "hot set"]
    head += ["rank", "bytes", "recall", "named"] if profiling.predictors else []
    rows = [_cells(str(index), layer) for index, layer in enumerate(profiling.layers)]
    for row, trained in zip(rows, profiling.predictors, strict=False):
        row += [str(trained.predictor.rank), shown_bytes(trained.predictor.nbytes)]
        row += [f"{trained.recall:.1%}", f"{trained.named:.1%}"]
    rows.append(_cells("all", profiling.overall) + ([""] * 4 if profiling.predictors else []))
    print_columns(head, rows, right=range(1, len(head)))
    first, last = profiling.profile.tokens
    print(f"active: {profiling.profile.rule}; counted over {first} tokens, checked on {last} others")
    if profiling.in_experts is not None:
        print(f"in an expert that the router selected {profiling.in_experts:.1%} of the neurons are active")
    print("as many at random would cover " + ", ".join(f"{share:.0%}" for share in SHARES))


def _cells(name: str, part: "Coverage") -> list[str]:
    return [
        name,
        str(part.granules),
        f"{part.active:.1%}",
        *(f"{value:.1%}" for value in part.covered),
        "yes" if part.beats_uniform else "no",
    ]
