"""`edgeinfer eval`: perplexity of a model on a text, and divergence from another model."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_tui import interrupts
from edgeinfer_tui.options import arguments
from edgeinfer_tui.options.command_options import command
from edgeinfer_tui.output.columns import print_pairs
from edgeinfer_tui.output.labelled_progress import LabelledProgress
from edgeinfer_tui.text_files import text_of

if TYPE_CHECKING:
    from edgeinfer.evaluation.summary import Divergence, Estimate, Evaluation


TextFile = Annotated[
    Path, Option("--text", metavar="FILE", help="The text, in UTF-8.", exists=True, dir_okay=False)
]
Base = Annotated[
    str | None,
    Option(
        "--base",
        metavar="MODEL",
        help="Compare with this model of the same vocabulary; llama.cpp: with the same file there.",
    ),
]
Context = Annotated[
    int, Option("--context", "-c", min=8, help="Tokens of a window; its second half is scored.")
]
Chunks = Annotated[int | None, Option("--chunks", min=1, help="Maximum windows. [dim]All if left out[/]")]


@command("eval")
def eval_(
    text: TextFile,
    model: arguments.ModelArgument = None,
    base: Base = None,
    context: Context = 512,
    chunks: Chunks = None,
    base_kv: CacheType | None = None,
    as_json: arguments.AsJson = False,
    **given: Any,
) -> None:
    """Measure a model's perplexity on a text, and the divergence of its distributions from a base model's.

    As in llama.cpp, the text is split into windows of --context tokens, each processed
    with an empty KV cache; the tokens of its second half are scored.

    [bold]Examples[/]

      edgeinfer eval tiny --text story.txt

      edgeinfer eval model-Q4_K_M.gguf --base model-F16.gguf --text wiki.test.raw --chunks 20

      edgeinfer eval tiny --base llama.cpp --text story.txt

      edgeinfer eval tiny --kv q4_0 --base-kv f16 --text story.txt
    """
    settings = {"base": base, "base_kv": base_kv, "context": context, "chunks": chunks, **given}
    evaluation = _evaluated(model, text_of(text), settings)
    if as_json:
        print(json.dumps(dataclasses.asdict(evaluation), indent=2, allow_nan=False))
    else:
        print_pairs(_pairs(evaluation))


def _evaluated(model: str | None, text: str, settings: dict[str, Any]) -> "Evaluation":
    """`edgeinfer.evaluate` with a progress line; settings that are None keep their defaults."""
    from edgeinfer.evaluation.evaluating import evaluate

    given = {name: value for name, value in settings.items() if value is not None}
    interrupts.raise_exception()
    with LabelledProgress(time_left=True) as progress:
        return evaluate(model, text, **given, report=progress.step("windows"), **progress.loading())


def _pairs(evaluation: "Evaluation") -> list[tuple[str, str]]:
    windows = "1 window" if evaluation.windows == 1 else f"{evaluation.windows} windows"
    pairs = [
        (
            "tokens scored",
            f"{evaluation.tokens} in {windows} of {evaluation.context}, the second half of each",
        ),
        ("perplexity", _shown(evaluation.perplexity, ".4f")),
    ]
    return pairs + (_divergence_pairs(evaluation.divergence) if evaluation.divergence else [])


def _divergence_pairs(divergence: "Divergence") -> list[tuple[str, str]]:
    spread = (divergence.median, divergence.percentile_90, divergence.percentile_99, divergence.maximum)
    return [
        ("perplexity of the base", _shown(divergence.base_perplexity, ".4f")),
        ("perplexity / that of the base", _shown(divergence.perplexity_ratio, ".6f")),
        ("KL divergence, mean", _shown(divergence.mean, ".3e")),
        ("  median, 90 %, 99 %, maximum", ", ".join(f"{value:.3e}" for value in spread)),
        ("same most probable token", _shown(divergence.same_top, ".2%")),
        ("change of p, mean", _shown(divergence.mean_probability_change, ".3%")),
        ("change of p, root mean square", _shown(divergence.rms_probability_change, ".3%")),
    ]


def _shown(estimate: "Estimate", form: str) -> str:
    return f"{estimate.value:{form}} ± {estimate.error:{form}}"
