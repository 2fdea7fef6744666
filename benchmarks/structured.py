"""The cost of a JSON schema: decoding with and without one, alternating.

python benchmarks/structured.py --shapes tinyllama-1.1b --types Q4_0
"""

import time

import numpy as np

from edgeinfer.benchmarking.speed_runs import BenchedModel
from edgeinfer.benchmarking.tables import markdown
from edgeinfer.loading.loading import load
from edgeinfer.model import Model
from harness import suites


def _list_of(**properties: dict[str, object]) -> dict[str, object]:
    """A list of objects that is longer than any completion here."""
    item = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "array", "minItems": 1000, "items": item}


PLACE: dict[str, object] = {
    "type": "object",
    "properties": {
        "town": {"type": "string", "maxLength": 60},
        "kind": {"enum": ["house", "garden", "field of flowers"]},
        "known": {"type": "boolean"},
    },
    "required": ["town", "kind", "known"],
    "additionalProperties": False,
}
SCHEMAS = {
    "records": _list_of(
        name={"type": "string", "minLength": 3, "maxLength": 30},
        age={"type": "integer", "minimum": 0},
        kind={"enum": ["cat", "dog", "fox"]},
    ),
    "nested": _list_of(title={"type": "string"}, score={"type": "number"}, place=PLACE),
    "text": _list_of(story={"type": "string", "minLength": 10_000}),
}
TEMPERATURES = (0.0, 0.7)
PROMPT = "Once upon a time"
HEAD = (
    "model",
    "threads",
    "tokens",
    "schema",
    "temperature",
    "baseline, best",
    "schema, best",
    "more",
    "baseline, median",
    "median",
    "more",
)


def main() -> None:
    """Run the benchmark with the options of the command line."""
    options = suites.parser(__doc__ or "").parse_args()
    suite = suites.suite("Decoding with a JSON schema", options)
    rows = []
    for model in suite.benched_models():
        for threads in suite.threads:
            rows += _rows(model, threads, 8 if suite.smoke else 64, suite.rounds)
    suite.publish([("Milliseconds per token", markdown(HEAD, rows))])


def _rows(model: BenchedModel, threads: int, tokens: int, rounds: int) -> list[list[str]]:
    rows = []
    with load(model.path, context=2 * tokens + 64, threads=threads, device="cpu", draft=None) as loaded:
        for temperature in TEMPERATURES:
            durations: dict[str, list[float]] = {name: [] for name in ("", *SCHEMAS)}
            for _ in range(rounds):
                for name, times in durations.items():
                    times.append(_milliseconds(loaded, tokens, SCHEMAS.get(name), temperature))
            for name in SCHEMAS:
                cells = [model.name, str(threads), str(tokens), name, str(temperature)]
                for typical in (np.min, np.median):
                    before, after = typical(durations[""]), typical(durations[name])
                    cells += [f"{before:.2f}", f"{after:.2f}", f"{after / before - 1:+.1%}"]
                rows.append(cells)
    return rows


def _milliseconds(model: Model, tokens: int, schema: dict[str, object] | None, temperature: float) -> float:
    """Milliseconds per token after the first; end-of-text tokens are banned."""
    banned = dict.fromkeys(model.tokenizer.end_ids, -np.inf)
    stream = model.stream(
        PROMPT, max_tokens=tokens, schema=schema, temperature=temperature, seed=1, logit_bias=banned
    )
    next(stream)
    begin, count = time.perf_counter(), sum(1 for _ in stream)
    return 1000 * (time.perf_counter() - begin) / max(1, count)


if __name__ == "__main__":
    suites.main(main)
