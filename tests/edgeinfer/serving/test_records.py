"""Metrics in Prometheus' format, and a log line for each request."""

import json

import pytest

pytest.importorskip("starlette")

from tests.edgeinfer.serving.http_client import CHAT, HELLO, JSON, client, fake

pytestmark = pytest.mark.anyio


async def test_requests_and_tokens_are_counted_and_logged() -> None:
    lines: list[str] = []
    body = {"messages": [*HELLO, {"role": "user", "content": "Secret"}], "temperature": 0}
    async with client(fake("The fox."), log=lines.append) as http:
        for streamed in (False, True):
            await http.post(CHAT, content=json.dumps({**body, "stream": streamed}), headers=JSON)
        await http.post(CHAT, content=b"{", headers=JSON)
        await http.get("/nope/%1b[31m?q=1")
        metrics = await http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = dict(line.rsplit(" ", 1) for line in metrics.text.splitlines() if not line.startswith("#"))
    assert values['edgeinfer_requests_total{route="/v1/chat/completions",status="200"}'] == "2.0"
    assert values['edgeinfer_requests_total{route="/v1/chat/completions",status="400"}'] == "1.0"
    assert values['edgeinfer_requests_total{route="other",status="404"}'] == "1.0"
    assert values['edgeinfer_generated_tokens_total{model="fake"}'] == str(2.0 * len("The fox."))
    assert float(values['edgeinfer_cached_prompt_tokens_total{model="fake"}']) > 0
    assert values['edgeinfer_first_token_seconds_count{model="fake"}'] == "2.0"
    assert (values["edgeinfer_requests_waiting"], values["edgeinfer_models_loaded"]) == ("0.0", "1.0")
    assert lines[0].startswith(f"POST {CHAT} 200, fake, ")
    assert lines[1].partition(" + ")[2].startswith(f"{len('The fox.')} tokens, ")
    assert [line.rpartition(",")[0] for line in lines[2:4]] == [
        f"POST {CHAT} 400",
        "GET /nope/\\x1b[31m 404",
    ]
    assert "Secret" not in "".join(lines)


async def test_metrics_need_the_key_and_health_does_not() -> None:
    async with client(fake(), key="secret") as http:
        statuses = [(await http.get(path)).status_code for path in ("/metrics", "/health")]
    assert statuses == [401, 200]
