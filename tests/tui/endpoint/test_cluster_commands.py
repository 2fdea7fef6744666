"""`batch --ray` and `serve --ray`: mistakes, and a batch on a cluster of this machine."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from tests.edgeinfer.cluster.ray_clusters import ray_machines
from tests.tui.conftest import CommandLine


def requests(folder: Path) -> Path:
    path = folder / "in.jsonl"
    body = {"prompt": "Once", "max_tokens": 4, "temperature": 0}
    lines = [{"custom_id": name, "url": "/v1/completions", "body": body} for name in "ab"]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def test_ray_is_named_if_it_is_not_installed(
    edgeinfer: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    message = "edgeinfer: --ray needs Ray: pip install 'edgeinfer[ray]', on every node\n"
    outcome = edgeinfer("batch", str(requests(tmp_path)), str(tmp_path / "out"), "--ray", "auto")
    assert (outcome.code, outcome.err) == (1, message)
    assert edgeinfer("serve", "tiny", "--ray", "auto").err == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("serve tiny --replicas 2", "--replicas is for a cluster; give its address with --ray"),
        ("serve --ray auto", "--ray: saw 0 models, wanted one, which every node has"),
        ("serve tiny tiny --ray auto", "--ray: saw 2 models, wanted one"),
        ("serve tiny --ray auto --port 0", "--port 0: Ray Serve selects none"),
        ("serve tiny --ray auto --host 0.0.0.0", "--host 0.0.0.0 is reachable from the whole network"),
        ("serve no-such-model --ray auto", "no-such-model"),
        (
            "batch IN OUT --ray auto --engine openai",
            "--ray and --engine openai both say where the requests go",
        ),
        ("batch IN OUT --ray auto --model no-such-model", "no-such-model"),
    ],
)
def test_mistakes_are_one_line(edgeinfer: CommandLine, tmp_path: Path, arguments: str, message: str) -> None:
    source, target = str(requests(tmp_path)), str(tmp_path / "out")
    paths = {"IN": source, "OUT": target}
    outcome = edgeinfer(*(paths.get(each, each) for each in arguments.split()))
    assert outcome.code in (1, 2)
    assert outcome.err.startswith(f"edgeinfer: {message}")
    assert outcome.err.count("\n") == 1


@pytest.mark.slow
def test_a_batch_on_a_cluster_has_the_rows_of_one_on_this_machine(
    edgeinfer: CommandLine, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    source, here, there = str(requests(tmp_path)), tmp_path / "here", tmp_path / "there"
    model = ("--model", "tiny", "--threads", "1")
    assert edgeinfer("batch", source, str(here), *model).code == 0
    with ray_machines(2) as machines:
        outcome = edgeinfer("batch", source, str(there), *model, "--ray", machines.address)
        assert outcome.code == 0
        assert outcome.err.endswith("edgeinfer: 2 lines completed, 0 with an error\n")
        again = edgeinfer("batch", source, str(there), *model, "--ray", machines.address)
        assert again.err.endswith("0 lines completed, 0 with an error, 2 were done before\n")
    texts = [
        sorted(
            (row["custom_id"], row["response"]["body"]["choices"][0]["text"])
            for row in map(json.loads, path.read_text().splitlines())
        )
        for path in (here, there)
    ]
    assert texts[0] == texts[1]
