"""Experts that change places, against whole layers that stay: tokens of even and of uneven routing."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from edgeinfer.benchmarking.workloads import random_ids
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.loading.loading import load
from edgeinfer.planning.model_plan import model_sizes
from edgeinfer_offload.planner import planner
from edgeinfer_offload.runtime.split_backend import SplitBackend
from harness.split_runs import overhead, placed

HEAD = ("model", "budget", "placement", "routing", "tokens", "ms a token", "on the GPU")
STAYING, CHANGING = 0.0, float("inf")
"""`CHANGING_WORTH` under which experts never and always change."""
TOKENS, SHOWN = 600, 100
"""Tokens of each kind of routing, and how many are shown together."""
FEW = 6
"""Tokens that take turns: of a random model they use few experts, different tokens all alike."""


def changing_rows(path: Path, share: float, context: int, threads: int | None) -> Iterator[list[str]]:
    """Rows under HEAD of a mixture at a budget that is a share of its weights, keys and values."""
    sizes = model_sizes(path)
    budget = overhead(path, context, "auto", threads, sizes) + int(share * sizes.nbytes)
    few = [random_ids(FEW, sizes.vocabulary, seed) for seed in (11, 12)]
    texts = {
        "even": random_ids(TOKENS, sizes.vocabulary, 7),
        "few": [few[0][i % FEW] for i in range(TOKENS)],
        "others": [few[1][i % FEW] for i in range(TOKENS)],
    }
    usual = planner.CHANGING_WORTH
    try:
        for planner.CHANGING_WORTH in (STAYING, CHANGING):
            with load(path, context=context, vram=budget, threads=threads, draft=None) as model:
                assert isinstance(model.engine, NativeEngine)
                backend = model.engine.backend
                if not isinstance(backend, SplitBackend) or model.plan is None:
                    return
                ways = any(layer.changing for layer in model.plan.layers)
                name = f"{placed(model.plan)}, {'changing' if ways else 'staying'}"
                for routing, ids in texts.items():
                    for first in range(0, TOKENS, SHOWN):
                        cells = _cells(backend, ids[first : first + SHOWN], first)
                        yield [path.stem, f"{share:.0%}", name, routing, f"{first}-{first + SHOWN}", *cells]
    finally:
        planner.CHANGING_WORTH = usual


def _cells(backend: SplitBackend, ids: Sequence[int], start: int) -> tuple[str, str]:
    """The median token, and the share of experts that the GPU had of what was asked for in divided layers."""
    before, spent = backend.pairs, []
    for place, token in enumerate(ids, start):
        begin = time.perf_counter()
        backend.choose(token, place)
        spent.append(time.perf_counter() - begin)
    seen, here = (now - then for now, then in zip(backend.pairs, before, strict=True))
    return f"{1000 * median(spent):.3f}", f"{1 - here / seen:.0%}" if seen else ""
