"""Batches over a Ray cluster of two nodes on this machine."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import needs

pytest.importorskip("starlette")

from edgeinfer.cluster.node_requests import NodeRequests
from edgeinfer.cluster.ray_nodes import RayCluster, engine_cluster
from edgeinfer.errors import EdgeInferError, SettingError
from edgeinfer.serving.batch.batch_run import run_batch
from edgeinfer.serving.batch.lines import read_lines
from edgeinfer.serving.batch.output_file import BatchOutput
from tests.edgeinfer.cluster.ray_clusters import RayMachines, ray_machines

pytestmark = [pytest.mark.anyio, pytest.mark.slow, needs("ray")]


@pytest.fixture(scope="module")
def machines() -> Iterator[RayMachines]:
    with ray_machines(2) as started:
        yield started


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def requests(folder: Path, count: int) -> Path:
    path = folder / "in.jsonl"
    body = {"temperature": 0, "max_tokens": 12}
    lines = [
        {
            "custom_id": f"c{n}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {**body, "prompt": f"Once upon a time {n}"},
        }
        for n in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def texts(path: Path) -> dict[str, str]:
    """custom_id -> text; fails for a row that is there twice."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}
    assert len(found) == len(rows)
    return found


async def test_two_nodes_give_the_texts_of_the_model(machines: RayMachines, tmp_path: Path) -> None:
    import edgeinfer

    cluster = engine_cluster(machines.address, "tiny", {"threads": 1, "parallel": 2}, 32)
    assert cluster.size == 2
    notes: list[str] = []
    source, target = requests(tmp_path, 12), tmp_path / "out.jsonl"
    with BatchOutput(target) as output:
        counts = await run_batch(
            NodeRequests(cluster, 2, notes.append), read_lines(source), output, 8, lambda *_: None
        )
    assert counts.completed == 12
    assert sum(note.endswith("is ready") for note in notes) >= 1
    with edgeinfer.load("tiny", threads=1) as model:
        expected = {
            f"c{n}": model.generate(f"Once upon a time {n}", temperature=0.0, max_tokens=12).text
            for n in range(12)
        }
    assert texts(target) == expected


class SlowEngine:
    """Answers in a moment with the node's process id; the process of a victim ends at its fourth request."""

    def __init__(self, marker: str) -> None:
        self._marker, self._count = Path(marker), 0

    async def ready(self) -> str:
        return ""

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        self._count += 1
        if self._count == 4 and not self._marker.exists():
            self._marker.touch()
            os._exit(1)
        value = {"choices": [{"text": json.loads(body)["prompt"]}], "process": os.getpid()}
        return 200, json.dumps(value).encode()


async def test_a_process_killed_in_the_middle_loses_and_repeats_no_prompt(
    machines: RayMachines, tmp_path: Path
) -> None:
    cluster = RayCluster(machines.address, SlowEngine, str(tmp_path / "killed"))
    notes: list[str] = []
    source, target = requests(tmp_path, 60), tmp_path / "out.jsonl"
    with BatchOutput(target) as output:
        counts = await run_batch(
            NodeRequests(cluster, 3, notes.append, watch_seconds=0.2),
            read_lines(source),
            output,
            12,
            lambda *_: None,
        )
    assert (counts.completed, counts.failed) == (60, 0)
    assert texts(target) == {f"c{n}": f"Once upon a time {n}" for n in range(60)}
    assert sum("was lost" in note for note in notes) == 1


async def test_a_node_removed_in_the_middle_loses_and_repeats_no_prompt(tmp_path: Path) -> None:
    with ray_machines(2) as machines:
        cluster = RayCluster(machines.address, SlowEngine, str(tmp_path))
        source, target = requests(tmp_path, 60), tmp_path / "out.jsonl"
        notes: list[str] = []

        def progress(done: int, total: int) -> None:
            if done == 10:
                machines.remove_last()

        with BatchOutput(target) as output:
            counts = await run_batch(
                NodeRequests(cluster, 1, notes.append, watch_seconds=0.2),
                read_lines(source),
                output,
                4,
                progress,
            )
        assert (counts.completed, counts.failed) == (60, 0)
        assert len(texts(target)) == 60


async def test_a_model_that_no_node_has_is_one_line(machines: RayMachines, tmp_path: Path) -> None:
    cluster = engine_cluster(machines.address, "no-such-model", {}, 32)
    source, target = requests(tmp_path, 2), tmp_path / "out.jsonl"
    lines = read_lines(source)
    with BatchOutput(target) as output, pytest.raises(EdgeInferError, match=r"node .*: .*no-such-model"):
        await run_batch(NodeRequests(cluster, 1, lambda line: None), lines, output, 2, lambda *_: None)


def test_an_address_without_a_cluster_is_one_line() -> None:
    with pytest.raises(EdgeInferError, match=r"--ray 127.0.0.1:1: no Ray cluster there") as failure:
        RayCluster("127.0.0.1:1", SlowEngine, "")
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("address", ["", "ray://10.0.0.1:10001"])
def test_an_address_must_be_one(address: Any) -> None:
    with pytest.raises(SettingError, match=r"--ray: saw .*, wanted HOST:PORT"):
        RayCluster(address, SlowEngine, "")
