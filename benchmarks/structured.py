"""What keeping to a JSON schema costs: decoding with and without, in turns.

python benchmarks/structured.py --shapes tinyllama-1.1b --types Q4_0
"""

import time

import numpy as np

from edgeinfer.benchmarking import suites
from edgeinfer.benchmarking.speed_runs import BenchedModel
from edgeinfer.benchmarking.tables import markdown
from edgeinfer.loading.loading import load
from edgeinfer.model import Model

SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 3, "maxLength": 30},
            "age": {"type": "integer", "minimum": 0},
            "kind": {"enum": ["cat", "dog", "fox"]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    },
}
"""Longer than any answer here: it never ends before the tokens do."""
PROMPT = "Once upon a time"
HEAD = (
    "model",
    "threads",
    "tokens",
    "plain, best",
    "schema, best",
    "more",
    "plain, median",
    "median",
    "more",
)


def main() -> None:
    """Run what the command line asks for."""
    options = suites.parser(__doc__ or "").parse_args()
    suite = suites.suite("Decoding by a JSON schema", options)
    rows = []
    for model in suite.benched_models():
        for threads in suite.threads:
            rows.append(_cells(model, threads, 8 if suite.smoke else 64, suite.rounds))
    suite.publish([("Milliseconds a token", markdown(HEAD, rows))])


def _cells(model: BenchedModel, threads: int, tokens: int, rounds: int) -> list[str]:
    with load(model.path, context=2 * tokens + 64, threads=threads, device="cpu", draft=None) as loaded:
        plain, formed = [], []
        for _ in range(rounds):
            plain.append(_milliseconds(loaded, tokens, None))
            formed.append(_milliseconds(loaded, tokens, SCHEMA))
    best, typical = (np.min(plain), np.min(formed)), (np.median(plain), np.median(formed))
    cells = [model.name, str(threads), str(tokens)]
    for before, after in (best, typical):
        cells += [f"{before:.2f}", f"{after:.2f}", f"{after / before - 1:+.1%}"]
    return cells


def _milliseconds(model: Model, tokens: int, schema: dict[str, object] | None) -> float:
    """A token of an answer behind its first; an end of the text is not one of the choices."""
    banned = dict.fromkeys(model.tokenizer.end_ids, -np.inf)
    stream = model.stream(
        PROMPT, max_tokens=tokens, schema=schema, temperature=0.7, seed=1, logit_bias=banned
    )
    next(stream)
    begin, count = time.perf_counter(), sum(1 for _ in stream)
    return 1000 * (time.perf_counter() - begin) / max(1, count)


if __name__ == "__main__":
    suites.main(main)
