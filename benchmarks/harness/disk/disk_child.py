"""A program that joins a memory cgroup, loads a model and measures its tokens; prints a line of JSON.

Arguments: the folder of the cgroup or "", and the JSON of `ChildOptions`.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True)
class ChildOptions:
    """`how`: "mapped", "dense", or a value of the option `sparse`. `small`: a model whose forwards are the
    cost of a draft token; `agreement`: how often drafts are accepted.
    """

    path: str
    how: str
    ram: int | None
    threads: int
    tokens: int
    small: str = ""
    agreement: float = 0.0


@dataclass(frozen=True)
class ChildResult:
    """`seconds`: of the median token of the last half; `planned`: the same by the plan. `held`: resident
    bytes without those of files. `hits`: the share of active neurons that were in memory.
    """

    seconds: float
    planned: float
    held: int
    in_file: int
    load_seconds: float
    hits: float = 0.0
    note: str = ""


CONTEXT = 256


def drop_cached(path: Path) -> None:
    """Drop a file's pages from the page cache."""
    with suppress(FileNotFoundError):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def load_options(options: ChildOptions) -> dict[str, Any]:
    """The keywords of `load`."""
    sparse = "off" if options.how in ("mapped", "dense") else options.how
    return {
        "device": "cpu", "context": CONTEXT, "draft": None, "parallel": 1, "threads": options.threads,
        "ram": options.ram, "sparse": sparse, "repack": options.how != "mapped",
    }  # fmt: skip


def token_seconds(model: Any, count: int) -> list[float]:
    """Seconds of random tokens, one by one."""
    from edgeinfer.benchmarking.workloads import random_ids

    model.engine.rewind(0)
    spent = []
    for token in random_ids(count, model.engine.vocabulary_size, 1):
        begin = time.perf_counter()
        model.engine.append([token])
        spent.append(time.perf_counter() - begin)
    return spent


def drafted_seconds(model: Any, options: ChildOptions) -> list[float]:
    """Seconds for each token of completions that a planted drafter drafts; the first completion is the
    baseline's.
    """
    from edgeinfer.loading.loading import load
    from edgeinfer.model import Model
    from edgeinfer.speculation.speculator import Speculator
    from harness.drafts.planted_drafts import PlantedDrafter, ScriptedEngine

    settings: dict[str, Any] = {"max_tokens": options.tokens, "temperature": 0.0}
    ids = list(range(20, 28))
    baseline = model.generate(ids, **settings)
    script = [*baseline.prompt_ids, *baseline.ids]
    engine = ScriptedEngine(model.engine, script)
    small: dict[str, Any] = {"device": "cpu", "context": CONTEXT, "draft": None, "threads": options.threads}
    with load(options.small, **small) as cost:
        completion = Model(model.name, engine, model.tokenizer, None)
        speculator = Speculator(engine, PlantedDrafter(cost.engine, script, options.agreement))
        speculator.begin(speculator.measure(), {})
        completion.speculator = speculator
        spent = []
        for _ in range(3):
            begin = time.perf_counter()
            done = completion.generate(ids, **settings)
            spent.append((time.perf_counter() - begin) / len(done.ids))
    return spent


def hit_share(model: Any) -> float:
    """The share of active neurons that were in the windows."""
    windows = getattr(model.engine.backend.decoder, "windows", None)
    if windows is None:
        return 0.0
    reads, hits = (
        sum(getattr(window.args, name) for window in windows.windows.values()) for name in ("reads", "hits")
    )
    return float(hits / max(reads + hits, 1))


def run(options: ChildOptions) -> ChildResult:
    """Load the model with a cold cache, and measure."""
    from edgeinfer.loading.loading import load
    from edgeinfer_offload.machine.peak_memory import own_resident_bytes

    for suffix in ("", ".bundles"):
        drop_cached(Path(options.path + suffix))
    begin = time.perf_counter()
    with load(options.path, **load_options(options)) as model:
        loaded = time.perf_counter() - begin
        spent = drafted_seconds(model, options) if options.small else token_seconds(model, options.tokens)
        plan = model.plan
        return ChildResult(
            median(spent[len(spent) // 2 :]),
            plan.prediction.seconds,
            own_resident_bytes(),
            plan.file_weight_bytes,
            loaded,
            hit_share(model),
            "; ".join([*model.warnings, *model.details]),
        )


def main(arguments: Sequence[str]) -> None:
    """Join the group, then import everything else."""
    group, options = arguments
    if group:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    from edgeinfer.errors import EdgeInferError

    try:
        print(json.dumps(asdict(run(ChildOptions(**json.loads(options))))))
    except EdgeInferError as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    main(sys.argv[1:])
