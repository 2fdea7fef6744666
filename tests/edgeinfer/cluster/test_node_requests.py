"""Requests over the nodes of a cluster: shares, lost nodes, failures, and nodes that join."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from edgeinfer.cluster.node_requests import MAX_LOSSES, Node, NodeLostError, NodeRequests
from edgeinfer.errors import EdgeInferError
from edgeinfer.serving.batch.batch_run import BatchCounts, run_batch
from edgeinfer.serving.batch.lines import BatchLine
from edgeinfer.serving.batch.output_file import BatchOutput

pytestmark = pytest.mark.anyio

LINES = [BatchLine(f"id{n}", f"c{n}", "/v1/chat/completions", b"{}") for n in range(40)]


class FakeNode:
    """Answers after a turn of the event loop; it is lost after `lives` requests have begun."""

    def __init__(self, name: str, lives: int = 10**6, failure: str = "", starts: bool = True) -> None:
        self.name, self._lives, self._failure, self._starts = name, lives, failure, starts
        self.begun = self.now = self.most = 0
        self.given: Counter[str] = Counter()

    async def start(self) -> str:
        await asyncio.sleep(0)
        if not self._starts:
            raise NodeLostError
        return self._failure

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        self.begun += 1
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(3):
            await asyncio.sleep(0)
        self.now -= 1
        if self.begun > self._lives:
            raise NodeLostError
        return 200, json.dumps({"node": self.name}).encode()


class FakeCluster:
    """`waves`: the nodes that each call finds."""

    def __init__(self, *waves: Sequence[FakeNode]) -> None:
        self.waves = list(waves)
        self.gone: list[str] = []
        self.is_closed = False

    def joined(self) -> Sequence[Node]:
        return self.waves.pop(0) if self.waves else []

    def lost(self, node: Node) -> None:
        self.gone.append(node.name)

    def close(self) -> None:
        self.is_closed = True


async def ran(
    cluster: FakeCluster, folder: Path, notes: Callable[[str], None] = lambda line: None, parallel: int = 16
) -> tuple[BatchCounts, list[Any]]:
    target = NodeRequests(cluster, 4, notes, watch_seconds=0.0, patience_seconds=0.05)
    path = folder / "out.jsonl"
    try:
        with BatchOutput(path) as output:
            counts = await run_batch(target, LINES, output, parallel, lambda done, total: None)
    finally:
        assert cluster.is_closed
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    return counts, rows


def ids(rows: list[Any]) -> list[str]:
    return sorted(row["id"] for row in rows)


ALL = sorted(line.id for line in LINES)


async def test_nodes_share_the_requests_and_none_gets_more_than_it_may(tmp_path: Path) -> None:
    nodes = [FakeNode("a"), FakeNode("b")]
    counts, rows = await ran(FakeCluster(nodes), tmp_path)
    assert (counts.completed, ids(rows)) == (40, ALL)
    assert [node.most for node in nodes] == [4, 4]
    assert min(node.begun for node in nodes) >= 16


async def test_a_node_lost_in_the_middle_loses_and_repeats_no_request(tmp_path: Path) -> None:
    notes: list[str] = []
    cluster = FakeCluster([FakeNode("a", lives=6), FakeNode("b")])
    counts, rows = await ran(cluster, tmp_path, notes.append)
    assert (counts.completed, counts.failed, ids(rows)) == (40, 0, ALL)
    assert cluster.gone == ["a"]
    assert notes.count("a: was lost; its requests go to other nodes") == 1


async def test_a_node_that_joins_later_gets_requests(tmp_path: Path) -> None:
    late = FakeNode("late")
    _, rows = await ran(FakeCluster([FakeNode("a", lives=5)], [], [late]), tmp_path)
    assert ids(rows) == ALL
    assert late.begun >= 35


async def test_a_node_that_cannot_run_the_model_is_left_out(tmp_path: Path) -> None:
    notes: list[str] = []
    _, rows = await ran(
        FakeCluster([FakeNode("a", failure="m: no such model"), FakeNode("b")]), tmp_path, notes.append
    )
    assert ids(rows) == ALL
    assert "a: m: no such model" in notes


async def test_if_no_node_can_run_the_model_the_first_reason_is_the_error(tmp_path: Path) -> None:
    nodes = [FakeNode("a", failure="m: no such model"), FakeNode("b", failure="other")]
    with pytest.raises(EdgeInferError, match="a: m: no such model"):
        await ran(FakeCluster(nodes), tmp_path)


async def test_without_a_node_the_batch_ends_and_keeps_its_rows(tmp_path: Path) -> None:
    with pytest.raises(EdgeInferError, match="no node of the cluster is left; the same command continues"):
        await ran(FakeCluster([FakeNode("a", lives=6), FakeNode("b", starts=False)]), tmp_path)
    first = ids([json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()])
    assert 0 < len(first) < 40
    counts, rows = await ran(FakeCluster([FakeNode("c")]), tmp_path)
    assert (counts.completed, ids(rows)) == (40 - len(first), ALL)


async def test_a_request_that_ends_every_node_ends_the_batch(tmp_path: Path) -> None:
    nodes = [FakeNode(str(n), lives=0) for n in range(MAX_LOSSES + 2)]
    with pytest.raises(EdgeInferError, match=f"{MAX_LOSSES} nodes were lost during it"):
        await ran(FakeCluster(nodes), tmp_path, parallel=1)
