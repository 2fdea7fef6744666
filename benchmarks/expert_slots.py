"""Replays recorded traces of experts: how often a requested expert is in GPU memory.

python benchmarks/expert_slots.py --models tiny --shares 0.1,0.25,0.5

A dense model with a ReLU becomes a MoE by grouping the neurons of a layer that are active together; a token's
experts are the groups with the most active neurons (Zhang et al. 2022, MoEfication, §3). Hot experts are
counted on the first half of the trace, the hit rates are measured on the second.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgeinfer.benchmarking.machine import command_line, this_machine
from edgeinfer.benchmarking.tables import markdown
from edgeinfer.loading.loading import load
from edgeinfer.model import Model
from edgeinfer.profiling.recording import WINDOW, SeenRows, cpu_engine, generated_texts, record, windows_of
from edgeinfer_kernels.blocks.moe import MoeSpec
from edgeinfer_offload.runtime.expert_cache_policy import CacheSimulation, ExpertCachePolicy, simulate
from harness import suites

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
ROUNDS = 12


def recorded_traces(
    name: str, texts: Sequence[str], tokens: int, experts: int, used: int, threads: int | None
) -> list[Ints]:
    """For each layer the experts (tokens, used) selected for the tokens of the texts, in order; without
    a text, of text that the model generates. `experts`, `used`: the MoE that a dense model is grouped into.

    Raises `EdgeInferError`: what `load` raises, or a model that generates no text.
    """
    with load(name, device="cpu", sparse="off", draft=None, threads=threads) as model:
        ids = [token for text in texts for token in model.tokenizer.encode(text)][:tokens]
        windows = windows_of(ids, min(WINDOW, model.context)) if texts else generated_texts(model, tokens)
        layers = cpu_engine(model)[0].specification.layers
        facts = [layer.blocks[-1].block for layer in layers]
        active = _active(model, windows)
    traces = []
    for fact, seen in zip(facts, active, strict=True):
        if isinstance(fact, MoeSpec):
            traces.append(np.nonzero(seen)[1].reshape(len(seen), fact.experts_per_token))
        else:
            traces.append(most_active(seen, grouped(seen[: len(seen) // 2], experts), used))
    return traces


def _active(model: Model, windows: Sequence[Sequence[int]]) -> list[Bools]:
    """For each layer which neurons or experts were active, (tokens, units)."""
    layers: dict[int, list[Bools]] = {}

    def seen(layer: int, rows: SeenRows) -> None:
        layers.setdefault(layer, []).append(rows.active)

    record(model, windows, seen)
    return [np.concatenate(layers[layer]) for layer in sorted(layers)]


def grouped(active: Bools, groups: int) -> Ints:
    """The group (neurons,) of each neuron, all of one size, such that neurons of a group are active together:
    k-means on the tokens that activate them, `active` (tokens, neurons).
    """
    rows = active.T.astype(np.float32) - active.mean(axis=1, dtype=np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True) + 1e-6
    size = -(-len(rows) // groups)
    centres = rows[np.random.default_rng(0).permutation(len(rows))[:groups]]
    group = np.zeros(len(rows), np.int64)
    for _ in range(ROUNDS):
        group = _filled(rows @ centres.T, size)
        centres = np.stack([rows[group == number].mean(axis=0) for number in range(groups)])
        centres /= np.linalg.norm(centres, axis=1, keepdims=True) + 1e-6
    return group


def _filled(similarity: npt.NDArray[np.float32], size: int) -> Ints:
    """A group for each row of `similarity` (rows, groups), most similar pairs first, `size` rows
    each.
    """
    group, room = np.full(len(similarity), -1, np.int64), np.full(similarity.shape[1], size)
    for flat in np.argsort(-similarity, axis=None):
        row, number = divmod(int(flat), similarity.shape[1])
        if group[row] < 0 and room[number]:
            group[row] = number
            room[number] -= 1
    return group


def most_active(active: Bools, group: Ints, used: int) -> Ints:
    """(tokens, used): the groups with the most active neurons of each token."""
    member = np.zeros((len(group), int(group.max()) + 1), np.float32)
    member[np.arange(len(group)), group] = 1
    counts = active.astype(np.float32) @ member
    return np.argsort(-counts, axis=1, kind="stable")[:, :used]


HEAD = (
    "model",
    "slots",
    "placement",
    "hits",
    "copies per 1000 tokens and layer",
    "CPU reads per token and layer",
)


def main() -> None:
    """Run the benchmark with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="tiny", help="names or paths with commas (%(default)s)")
    parser.add_argument(
        "--text",
        type=Path,
        action="append",
        default=[],
        help="text files (default: the model generates)",
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of text (%(default)s)")
    parser.add_argument("--experts", type=int, default=64, help="of a dense model (%(default)s)")
    parser.add_argument("--used", type=int, default=8, help="of these by a token (%(default)s)")
    parser.add_argument("--shares", default="0.1,0.25,0.5", help="of the experts with a slot (%(default)s)")
    parser.add_argument(
        "--tokens-per-copy", type=int, default=2, help="until a copy is complete (%(default)s)"
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: those that read fastest)")
    parser.add_argument("--smoke", action="store_true", help="takes seconds, to check that it runs")
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
            rows += _rows(model, trace, share, options.experts, options.tokens_per_copy)
    table = markdown(HEAD, rows, left=(0, 2))
    facts = this_machine(command_line()).lines()
    suites.write_report("Slots for experts over recorded traces", facts, [("hits", table)], options.out)


def _rows(model: str, trace: Ints, share: float, experts: int, tokens_per_copy: int) -> list[list[str]]:
    """One number of slots, with each expert placement."""
    experts = max(experts, int(trace.max()) + 1)
    count, half = max(1, round(share * experts)), trace.shape[1] // 2
    first_half, second_half = trace[:, :half], trace[:, half:]
    hot, best = _hottest(first_half, experts, count), _hottest(second_half, experts, count)
    first = [list(range(count))] * len(trace)
    variants = {
        "the first by number, fixed": (first, False),
        "hot in the first half, fixed": (hot, False),
        "hot in this half, fixed (an upper bound)": (best, False),
        "the first by number, expert cache": (first, True),
        "hot in the first half, expert cache": (hot, True),
    }
    rows = []
    for name, (residents, swapping) in variants.items():
        slots = ExpertCachePolicy(experts, trace.shape[2], residents)
        done = simulate(second_half, slots, tokens_per_copy=tokens_per_copy, swapping=swapping)
        rows.append([model, f"{count} of {experts}", name, *_cells(done, second_half)])
    return rows


def _hottest(trace: Ints, experts: int, count: int) -> list[list[int]]:
    """For each layer its `count` most used experts."""
    counts = [np.bincount(layer.ravel(), minlength=experts) for layer in trace]
    return [np.argsort(-each, kind="stable")[:count].tolist() for each in counts]


def _cells(done: CacheSimulation, trace: Ints) -> list[str]:
    tokens = trace.shape[0] * trace.shape[1]
    reads = (done.requested - done.hits) / tokens
    return [f"{done.hit_rate:.1%}", f"{1000 * done.copies / tokens:.1f}", f"{reads:.3f}"]


if __name__ == "__main__":
    suites.main(main)
