"""`edgeinfer embed` and `rank`: vectors of texts, and texts sorted by their relevance to a query."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, BadParameter, Option

from edgeinfer_tui import interrupts, library
from edgeinfer_tui.confirmation import on_terminal
from edgeinfer_tui.library import LoadedModel
from edgeinfer_tui.options import arguments
from edgeinfer_tui.options.command_options import command
from edgeinfer_tui.options.settings import filled
from edgeinfer_tui.output.columns import one_line, print_columns
from edgeinfer_tui.output.labelled_progress import LabelledProgress
from edgeinfer_tui.output.script_output import prompts_by_line
from edgeinfer_tui.text_files import text_of

if TYPE_CHECKING:
    from edgeinfer.embedding import Vectors

TEXTS_PER_CALL = 256
"""Texts that are processed before the next ones are: progress and output come in such steps."""
DIGITS = 7
"""Significant digits of a vector's elements; more aren't exact in float32."""


class PoolingName(StrEnum):
    """Values of --pooling."""

    mean = "mean"
    cls = "cls"
    last = "last"


Model = Annotated[
    str,
    Argument(
        help="A name from `edgeinfer list`, or a .gguf file.",
        show_default=False,
        autocompletion=arguments.models_here,
    ),
]
Texts = Annotated[
    list[str] | None,
    Argument(help="The texts. [dim](the lines of standard input)[/]", show_default=False),
]
TextFiles = Annotated[
    list[Path] | None,
    Option(
        "--text",
        metavar="FILE",
        help="A file that is one text, in UTF-8; may be repeated.",
        exists=True,
        dir_okay=False,
    ),
]


@command("embed")
def embed(
    model: Model,
    texts: Texts = None,
    text: TextFiles = None,
    pooling: Annotated[
        PoolingName | None,
        Option(
            help="Hidden states that make the vector: the mean of all, that of the first token (cls) or of "
            "the last. [dim](as the file specifies, else mean)[/]",
            show_default=False,
        ),
    ] = None,
    normalize: Annotated[
        bool, Option("--normalize/--no-normalize", help="Scale vectors to length 1.", show_default=False)
    ] = True,
    similarity: Annotated[
        bool, Option("--similarity", help="Print the cosine similarity of each two texts instead.")
    ] = False,
    as_json: arguments.AsJson = False,
    **given: Any,
) -> None:
    """Compute embeddings of texts: vectors, of which similar texts have similar ones.

    Each vector is a line on stdout, a JSON array, in the order of the texts.
    --json prints one object with the vectors, their dimensions and the number of tokens.

    [bold]Examples[/]

      edgeinfer embed nomic-embed-text-v1.5 "search_query: fast foxes"

      edgeinfer embed nomic-embed-text-v1.5 --similarity "a fox" "a vixen" "a cake"

      edgeinfer embed nomic-embed-text-v1.5 --text a.txt --text b.txt --json

      edgeinfer embed nomic-embed-text-v1.5 < lines.txt > vectors.jsonl
    """
    if similarity and as_json:
        raise BadParameter("--similarity and --json exclude each other: the vectors are in the JSON")
    all_texts = _texts(texts, text)
    with _loaded(model, given) as (loaded, progress):
        lines = not (similarity or as_json)
        vectors: list[Vectors] = []
        tokens = 0
        for done in range(0, len(all_texts), TEXTS_PER_CALL):
            progress.update("texts", done, len(all_texts))
            part = loaded.text_vectors(
                all_texts[done : done + TEXTS_PER_CALL], pooling=pooling, normalize=normalize
            )
            tokens += part.tokens
            progress.erase()
            for vector in part.vectors:
                vectors.append(vector)
                if lines:
                    print(json.dumps(_rounded(vector)), flush=True)
        if similarity:
            _print_similarity(vectors, all_texts)
        elif as_json:
            print(json.dumps(_record(loaded.name, vectors, tokens), allow_nan=False))


@command("rank")
def rank(
    model: Model,
    query: Annotated[str, Argument(help="The query.", show_default=False)],
    texts: Texts = None,
    text: TextFiles = None,
    top: Annotated[int | None, Option("--top", min=1, help="Print the first texts only.")] = None,
    as_json: arguments.AsJson = False,
    **given: Any,
) -> None:
    """Sort texts by their relevance to a query, with a reranker.

    A classifier's score is its logit, Qwen3-Reranker's is the probability of "yes";
    only the order and the differences within one call matter.

    [bold]Examples[/]

      edgeinfer rank bge-reranker-v2-m3 "what is a panda?" "A bear in China." "A kind of car."

      grep -h fox *.txt | edgeinfer rank bge-reranker-v2-m3 "where do foxes live?" --top 5
    """
    all_texts = _texts(texts, text)
    with _loaded(model, given) as (loaded, progress):
        progress.update("texts", 0, len(all_texts))
        ranking = loaded.ranking(query, all_texts)
    ranked = ranking.texts[:top]
    if as_json:
        results = [{"index": one.index, "score": one.score, "text": one.text} for one in ranked]
        print(json.dumps({"model": loaded.name, "tokens": ranking.tokens, "results": results}, indent=2))
    else:
        rows = [[f"{one.score:.4f}", str(one.index), one_line(one.text)] for one in ranked]
        print_columns(["SCORE", "INDEX", "TEXT"], rows, right={0, 1})


def _texts(given: Sequence[str] | None, files: Sequence[Path] | None) -> list[str]:
    """The texts of the command line, then those of the files; without any, the lines of standard input."""
    texts = [*(given or []), *(text_of(path) for path in files or [])]
    if not (given or files):
        if sys.stdin is None or on_terminal(sys.stdin):
            raise BadParameter("no text: give texts, --text FILE, or lines on standard input")
        texts = list(prompts_by_line(sys.stdin.buffer))
    if not texts:
        raise BadParameter("no text: standard input is empty")
    if not all(texts):
        raise BadParameter("saw an empty text, wanted texts with at least one character")
    return texts


@contextmanager
def _loaded(model: str, given: dict[str, Any]) -> Iterator[tuple[LoadedModel, LabelledProgress]]:
    """The model, loaded with the options given and the settings, and the line for progress."""
    library.check_model(model)
    options = {name: value for name, value in filled(given).items() if value is not None}
    interrupts.raise_exception()
    with LabelledProgress(time_left=True) as progress:
        loading = progress.loading()
        with library.load_model(
            model, {**options, "draft": None}, loading["progress"], loading["build_progress"]
        ) as loaded:
            progress.erase()
            yield loaded, progress


def _rounded(vector: "Vectors") -> list[float]:
    """The elements with `DIGITS` significant digits."""
    return [float(f"{element:.{DIGITS}g}") for element in vector]


def _record(name: str, vectors: "list[Vectors]", tokens: int) -> dict[str, Any]:
    return {
        "model": name,
        "dimensions": len(vectors[0]),
        "tokens": tokens,
        "embeddings": [_rounded(vector) for vector in vectors],
    }


def _print_similarity(vectors: "list[Vectors]", texts: list[str]) -> None:
    """A row for each text: its number, its cosine similarity to each text, and its beginning."""
    from edgeinfer.embedding import cosine_similarities

    numbers = [str(index) for index in range(len(texts))]
    rows = [
        [number, *(f"{value:.4f}" for value in cosines), one_line(text, 60)]
        for number, cosines, text in zip(numbers, cosine_similarities(vectors), texts, strict=True)
    ]
    print_columns(["", *numbers, "TEXT"], rows, right=range(len(texts) + 1))
