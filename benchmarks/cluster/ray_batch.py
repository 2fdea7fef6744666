"""A batch over the nodes of a Ray cluster: two nodes against one, and a node that ends in the middle.

python benchmarks/cluster/ray_batch.py
python benchmarks/cluster/ray_batch.py --model tiny

The nodes are processes on this machine. Without --model an engine waits instead of computing: a request
takes `--seconds`, four at a time, as on another machine; this measures Ray and the distribution.
With --model each node runs it with one thread, so that nodes share no core if there are enough.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgeinfer.benchmarking.machine import command_line, this_machine
from edgeinfer.benchmarking.tables import markdown
from edgeinfer.cluster.node_requests import NodeRequests
from edgeinfer.cluster.ray_nodes import RayCluster, engine_cluster
from edgeinfer.serving.batch.batch_run import run_batch
from edgeinfer.serving.batch.lines import read_lines
from edgeinfer.serving.batch.output_file import BatchOutput

STORE_BYTES = 100 << 20
TOGETHER = 4
"""Requests that a simulated node computes at once."""
PER_NODE = 8


class WaitingEngine:
    """Takes `seconds` for a request, `TOGETHER` at a time. Its process ends at request `dies_at`, unless the
    file `marker` says that another one has ended.
    """

    def __init__(self, seconds: float, dies_at: int, marker: str) -> None:
        self._seconds, self._dies_at, self._marker = seconds, dies_at, Path(marker)
        self._free = asyncio.Semaphore(TOGETHER)
        self._count = 0

    async def ready(self) -> str:
        return ""

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        async with self._free:
            self._count += 1
            if self._count == self._dies_at and not self._marker.exists():
                self._marker.touch()
                os._exit(1)
            await asyncio.sleep(self._seconds)
        return 200, json.dumps({"choices": [{"text": json.loads(body)["prompt"]}]}).encode()


@dataclass(frozen=True)
class Run:
    """`seconds`: from the first node's being ready to the last row; `rows`: of the output, with the ids that
    are there more than once.
    """

    label: str
    seconds: float
    rows: int
    repeated: int


def measured(label: str, cluster: RayCluster, source: Path, nodes: int) -> Run:
    """Complete the requests of `source`."""
    ready: list[float] = []

    def note(line: str) -> None:
        print(f"  {line}", flush=True)
        if line.endswith("is ready"):
            ready.append(time.perf_counter())

    lines = read_lines(source)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "out.jsonl"
        with BatchOutput(target) as output:
            requests = NodeRequests(cluster, PER_NODE, note, watch_seconds=0.2)
            counts = asyncio.run(run_batch(requests, lines, output, nodes * PER_NODE, lambda *_: None))
        end = time.perf_counter()
        ids = [json.loads(line)["id"] for line in target.read_text().splitlines()]
    assert counts.completed == len(lines), counts
    return Run(label, end - ready[0], len(ids), len(ids) - len(set(ids)))


def written(folder: Path, count: int, tokens: int) -> Path:
    """A file of requests."""
    path = folder / "in.jsonl"
    body = {"temperature": 0, "max_tokens": tokens}
    lines = [
        {"custom_id": f"c{n}", "url": "/v1/completions", "body": {**body, "prompt": f"Once upon a time {n}"}}
        for n in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def runs(options: argparse.Namespace, folder: Path) -> list[Run]:
    """One node, two nodes, and two of which one ends."""
    source = written(folder, options.requests, options.tokens)
    results = []
    cases = (
        ("one node", 1, 0),
        ("two nodes", 2, 0),
        ("two, one ends in the middle", 2, options.requests // 4),
    )
    for label, nodes, dies_at in cases:
        if options.model and dies_at:
            continue
        with local_nodes(nodes) as address:
            if options.model:
                cluster = engine_cluster(address, options.model, {"threads": 1}, PER_NODE)
            else:
                marker = str(folder / f"ended-{label}")
                cluster = RayCluster(address, WaitingEngine, options.seconds, dies_at, marker)
            print(label, flush=True)
            results.append(measured(label, cluster, source, nodes))
    return results


@contextmanager
def local_nodes(count: int) -> Iterator[str]:
    """A cluster of nodes on this machine; its address."""
    from ray.cluster_utils import Cluster

    options: dict[str, Any] = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    try:
        for _ in range(count - 1):
            cluster.add_node(**options)
        cluster.wait_for_nodes()
        yield str(cluster.address)
    finally:
        cluster.shutdown()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--model", help="run it, instead of waiting")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if find_spec("ray") is None:
        print("skipped: Ray isn't installed; pip install 'edgeinfer[ray]'")
        return
    if options.smoke:
        options.requests, options.seconds, options.tokens = 24, 0.05, 4
    with tempfile.TemporaryDirectory() as folder:
        results = runs(options, Path(folder))
    first = results[0].seconds
    table = [
        (run.label, f"{run.seconds:.1f}", f"{first / run.seconds:.2f}", str(run.rows), str(run.repeated))
        for run in results
    ]
    print("\n".join(this_machine(command_line()).lines()))
    print(markdown(("nodes", "seconds", "of one node's speed", "rows", "repeated"), table))


if __name__ == "__main__":
    main()
