"""Slots for experts in GPU memory over recorded traces: how often what a token asks for is in one.

python benchmarks/expert_slots.py --models tiny --shares 0.1,0.25,0.5

A dense model with a ReLU is made a mixture of groups of its neurons. Hot experts are learnt from the first
half of the trace, everything is judged on the second.
"""

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgeinfer.benchmarking.machine import command_line, this_machine
from edgeinfer.benchmarking.tables import markdown
from edgeinfer_offload.runtime.expert_cache_policy import ExpertCachePolicy, Replayed, replay
from harness import suites
from harness.expert_traces import recorded_traces

HEAD = (
    "model",
    "slots",
    "placement",
    "hits",
    "copies / 1000 tokens of a layer",
    "CPU reads a token of a layer",
)
Ints = npt.NDArray[np.int64]


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="tiny", help="names or paths with commas (%(default)s)")
    parser.add_argument(
        "--text", type=Path, action="append", default=[], help="what to read (the model's own tales)"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of text (%(default)s)")
    parser.add_argument("--experts", type=int, default=64, help="that a dense model is made (%(default)s)")
    parser.add_argument("--used", type=int, default=8, help="of these by a token (%(default)s)")
    parser.add_argument("--shares", default="0.1,0.25,0.5", help="of the experts with a slot (%(default)s)")
    parser.add_argument("--tokens-a-copy", type=int, default=2, help="until a copy is there (%(default)s)")
    parser.add_argument("--threads", type=int, help="of the CPU (as many as read fastest)")
    parser.add_argument("--smoke", action="store_true", help="in seconds: does it run at all?")
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    options = parser.parse_args()
    if options.smoke:
        options.tokens, options.experts, options.used, options.shares = 256, 16, 2, "0.25"
    shares = suites.shares(options.shares)
    texts = [path.read_text(encoding="utf-8") for path in options.text]
    rows = []
    for model in suites.words(options.models):
        sizes = options.tokens, options.experts, options.used
        trace = np.stack(recorded_traces(model, texts, *sizes, options.threads))
        for share in shares:
            rows += _rows(model, trace, share, options.experts, options.tokens_a_copy)
    table = markdown(HEAD, rows, left=(0, 2))
    facts = this_machine(command_line()).lines()
    suites.write_report("Slots for experts over recorded traces", facts, [("hits", table)], options.out)


def _rows(model: str, trace: Ints, share: float, experts: int, tokens_a_copy: int) -> list[list[str]]:
    """One number of slots, for each way of placing experts."""
    experts = max(experts, int(trace.max()) + 1)
    count, half = max(1, round(share * experts)), trace.shape[1] // 2
    learnt, judged = trace[:, :half], trace[:, half:]
    hot, best = _hottest(learnt, experts, count), _hottest(judged, experts, count)
    first = [list(range(count))] * len(trace)
    ways = {
        "the first by number, fixed": (first, False),
        "hot in the first half, fixed": (hot, False),
        "hot in this half, fixed (nobody knows that)": (best, False),
        "the first by number, changing": (first, True),
        "hot in the first half, changing": (hot, True),
    }
    found = []
    for name, (residents, swapping) in ways.items():
        slots = ExpertCachePolicy(experts, trace.shape[2], residents)
        done = replay(judged, slots, tokens_a_copy=tokens_a_copy, swapping=swapping)
        found.append([model, f"{count} of {experts}", name, *_cells(done, judged)])
    return found


def _hottest(trace: Ints, experts: int, count: int) -> list[list[int]]:
    """For each layer its `count` most used experts."""
    counts = [np.bincount(layer.ravel(), minlength=experts) for layer in trace]
    return [np.argsort(-each, kind="stable")[:count].tolist() for each in counts]


def _cells(done: Replayed, trace: Ints) -> list[str]:
    tokens = trace.shape[0] * trace.shape[1]
    reads = (done.asked - done.hits) / tokens
    return [f"{done.hit_rate:.1%}", f"{1000 * done.copies / tokens:.1f}", f"{reads:.3f}"]


if __name__ == "__main__":
    suites.main(main)
