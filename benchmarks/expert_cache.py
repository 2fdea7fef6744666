"""The expert cache on a GPU against fixed whole layers, with even and uneven routing.

python benchmarks/expert_cache.py --models qwen3-30b-a3b:10:Q4_0 --shares 0.35,0.65

A model is a shape, the number of its layers, and a type. Its weights are random: random tokens use all
experts equally, a few repeated tokens use few.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from edgeinfer.benchmarking.tables import markdown
from edgeinfer.benchmarking.workloads import random_ids
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.loading import gpu_loading
from edgeinfer.loading.loading import load
from edgeinfer.planning.model_plan import model_sizes
from edgeinfer_kernels.cuda.driver import list_gpus
from edgeinfer_offload.planner import planner
from edgeinfer_offload.runtime.split_backend import SplitBackend
from harness import suites
from harness.split_runs import overhead, placed

HEAD = ("model", "budget", "placement", "routing", "tokens", "ms per token", "on the GPU")
WITHOUT_CACHE, WITH_CACHE = 0.0, float("inf")
"""`MAX_EXPERT_CACHE_SLOWDOWN` with which the expert cache is never and always used."""
TOKENS, SHOWN = 600, 100
"""Tokens of each kind of routing, and tokens per row."""
FEW = 6
"""Tokens that are repeated in this order: with random weights they use few experts."""


def cache_rows(path: Path, share: float, context: int, threads: int | None) -> Iterator[list[str]]:
    """Rows under HEAD of a MoE at a budget that is a share of its weights, keys and values."""
    sizes = model_sizes(path)
    budget = overhead(path, context, "auto", threads, sizes) + int(share * sizes.nbytes)
    few = [random_ids(FEW, sizes.vocabulary, seed) for seed in (11, 12)]
    texts = {
        "even": random_ids(TOKENS, sizes.vocabulary, 7),
        "few": [few[0][i % FEW] for i in range(TOKENS)],
        "others": [few[1][i % FEW] for i in range(TOKENS)],
    }
    constants, name_of = vars(planner), "MAX_EXPERT_CACHE_SLOWDOWN"
    usual = constants[name_of]
    try:
        for constants[name_of] in (WITHOUT_CACHE, WITH_CACHE):
            with load(path, context=context, vram=budget, threads=threads, draft=None) as model:
                assert isinstance(model.engine, NativeEngine)
                backend = model.engine.backend
                if not isinstance(backend, SplitBackend) or model.plan is None:
                    return
                has_cache = any(layer.expert_cache for layer in model.plan.layers)
                name = f"{placed(model.plan)}, {'expert cache' if has_cache else 'fixed'}"
                for routing, ids in texts.items():
                    for first in range(0, TOKENS, SHOWN):
                        cells = _cells(backend, ids[first : first + SHOWN], first)
                        yield [path.stem, f"{share:.0%}", name, routing, f"{first}-{first + SHOWN}", *cells]
    finally:
        constants[name_of] = usual


def _cells(backend: SplitBackend, ids: Sequence[int], start: int) -> tuple[str, str]:
    """Time of the median token, and the share of requested experts that the GPU computed in split layers."""
    before, spent = backend.expert_counts, []
    for position, token in enumerate(ids, start):
        begin = time.perf_counter()
        backend.sample_next(token, position)
        spent.append(time.perf_counter() - begin)
    seen, here = (now - then for now, then in zip(backend.expert_counts, before, strict=True))
    return f"{1000 * median(spent):.3f}", f"{1 - here / seen:.0%}" if seen else ""


def main() -> None:
    """Run the benchmark with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="qwen3-30b-a3b:10:Q4_0", help="(%(default)s)")
    parser.add_argument(
        "--shares", default="0.35,0.65", help="budgets, as shares of the weights (%(default)s)"
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: those that read fastest)")
    parser.add_argument("--folder", type=Path, help="folder that keeps the model files (default: none)")
    parser.add_argument(
        "--smoke", action="store_true", help="one budget and two layers, to check that the program runs"
    )
    options = parser.parse_args()
    if options.smoke and not list_gpus():
        print("no GPU: the expert cache needs one", file=sys.stderr)
        return
    if options.smoke:
        options.models, options.shares = "qwen3-30b-a3b:2:Q4_0", "0.5"
    gpu_loading.TUNING_SECONDS = 0.0
    rows: list[list[str]] = []
    for path in suites.written_shapes(suites.words(options.models), options.folder):
        for share in suites.shares(options.shares):
            rows += cache_rows(path, share, TOKENS + 8, options.threads)
    print(markdown(HEAD, rows, left=(0, 2, 3)))


if __name__ == "__main__":
    suites.main(main)
