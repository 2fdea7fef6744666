"""Replicas under Ray Serve on two nodes of this machine: the server's responses, and routing by prefix."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import needs

pytest.importorskip("starlette")
pytest.importorskip("httpx")

import httpx

import edgeinfer
from edgeinfer.cluster.ray_serve import Deployment, RayServer, server_options
from edgeinfer.cluster.routed_request import prompt_text, routed
from edgeinfer.errors import EdgeInferError
from edgeinfer.serving.transport.access import LOCAL_HOSTS
from edgeinfer.serving.transport.local_exchange import LocalRequest
from tests.edgeinfer.cluster.ray_clusters import RayMachines, ray_machines

pytestmark = needs("ray")

PROMPT = "Once upon a time"
LIMITS = {"temperature": 0, "max_tokens": 12}
SECONDS = 60.0
KEY = "secret"
CHARACTERS = 600


def deployment(model: str, port: int) -> Deployment:
    options = server_options(KEY, 64, (*LOCAL_HOSTS, "127.0.0.1"))
    return Deployment(model, {"threads": 1}, options, "127.0.0.1", port)


@pytest.fixture(scope="module")
def machines() -> Iterator[RayMachines]:
    with ray_machines(2) as started:
        yield started


@pytest.fixture(scope="module")
def http(machines: RayMachines) -> Iterator[httpx.Client]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = RayServer(machines.address, deployment("tiny", port))
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=SECONDS) as client:
        yield client
    server.close()


@pytest.mark.slow
def test_a_model_that_the_nodes_do_not_have_is_one_line(machines: RayMachines) -> None:
    """Before the tests with `http`, whose application it would replace."""
    message = r"--ray: the replicas can't start .*no-such"
    with pytest.raises(EdgeInferError, match=message) as failure:
        RayServer(machines.address, deployment("no-such-model", 18000))
    assert "\n" not in str(failure.value)


@pytest.mark.slow
def test_replicas_give_the_responses_of_the_model(http: httpx.Client) -> None:
    with edgeinfer.load("tiny", threads=1) as model:
        expected = model.generate(PROMPT, temperature=0.0, max_tokens=12).text
    body = {"prompt": PROMPT, **LIMITS}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == expected
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(event["choices"][0]["text"] for event in events) == expected
    assert len(events) >= 12
    assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"


@pytest.mark.slow
def test_errors_come_from_the_replicas(http: httpx.Client) -> None:
    assert http.post("/v1/completions", json={"prompt": PROMPT, "top_q": 1}).status_code == 400
    refused = http.get("/v1/models", headers={"Authorization": "Bearer other"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    other = http.get("/v1/models", headers={"Host": "example.org"})
    assert other.status_code == 400, other.text


@pytest.mark.slow
def test_a_prompt_goes_to_the_replica_that_has_its_prefix(http: httpx.Client) -> None:
    """Without routing by prefix each of the second requests would have half a chance."""
    cached = []
    for number in range(6):
        text = f"{number} " + "a fox and a hare met at the old oak. " * (CHARACTERS // 36)
        first, second = (
            http.post("/v1/completions", json={"prompt": text + end, **LIMITS, "max_tokens": 2}).json()
            for end in ("", "They")
        )
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] <= 4
        usage = second["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
    assert min(cached) > 0.9


USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            {"messages": [{"role": "system", "content": "S"}, USER]},
            "system\nS\nuser\nHi",
        ),
        (
            {"messages": [{**USER, "content": [{"text": "Hi"}]}], "system": "S"},
            "S\nuser\nHi",
        ),
        ({"prompt": "Once"}, "Once"),
        ({"prompt": ["a", "b"]}, "a\nb"),
        ({"prompt": [1, 2]}, "\n"),
        ({"input": [{"role": "user", "content": "Hi"}], "instructions": "I"}, "I\nuser\nHi"),
        ({"model": "m"}, ""),
    ],
)
def test_the_prompt_of_a_body_is_its_text_from_the_start(body: dict[str, Any], text: str) -> None:
    assert prompt_text(body) == text


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"{}", b'{"prompt": ""}'])
def test_a_request_without_a_prompt_has_its_path(body: bytes) -> None:
    assert routed(LocalRequest("/v1/models", body)).prompt == "/v1/models"
