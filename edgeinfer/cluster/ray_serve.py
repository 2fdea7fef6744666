"""Replicas of the server under Ray Serve: a gateway sends each request to the replica that has its prefix."""

import contextlib
import importlib
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from edgeinfer.cluster.ray_library import INSTALL, connected
from edgeinfer.cluster.routed_request import RoutedRequest, routed
from edgeinfer.errors import EdgeInferError
from edgeinfer.serving.app import ServerOptions, serving_app
from edgeinfer.serving.fields import RequestError
from edgeinfer.serving.models.models import OneModel
from edgeinfer.serving.transport.bodies import MAX_BODY_BYTES, read_body
from edgeinfer.serving.transport.failures import failure
from edgeinfer.serving.transport.local_exchange import LocalRequest, ResponseHead, exchanged

REQUESTED_BY = "--ray"
APPLICATION = "edgeinfer"
PREFIX_ROUTER = "PrefixCacheAffinityRouter"
PREFIX_MODULES = (
    "ray.serve.llm.request_router",
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router",
)
"""Modules that have Ray's prefix-aware router. The first one is public; it needs the packages of Ray's own
LLM server, which the second one doesn't.
"""
MORE_REQUESTS = 4
"""If replicas differ by more requests than this, the prefix of a request doesn't select one."""
TREE_CHARACTERS = 4_000_000
"""Of prompts that the router remembers."""
GATEWAY_REQUESTS = 4096
TRIES = 3
"""Replicas that a request is sent to if they are lost before they answer."""


class Replica:
    """One copy of the model on one node, which plans for the node's own devices."""

    def __init__(self, model: str, loading: Mapping[str, Any], options: ServerOptions) -> None:
        import edgeinfer

        self._model = edgeinfer.load(model, **{"parallel": 0, **loading})
        self._app = serving_app(OneModel(self._model), options)

    async def respond(self, routed_request: RoutedRequest) -> AsyncIterator[ResponseHead | bytes]:
        """The head of the response, then its body in parts."""
        async with contextlib.aclosing(exchanged(self._app, routed_request.request)) as parts:
            async for part in parts:
                yield part


class Gateway:
    """Takes the HTTP requests. `replicas`: Ray Serve's handle of them."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        """The response of a replica, in parts as they come."""
        try:
            body = await read_body(request, MAX_BODY_BYTES)
        except RequestError as error:
            return failure(error, request.url.path)
        local = LocalRequest(
            request.url.path,
            body,
            request.method,
            request.url.query.encode(),
            tuple((name, value) for name, value in request.headers.raw if name != b"content-length"),
        )
        for _ in range(TRIES):
            parts = self._replicas.respond.remote(routed(local))
            try:
                head = await anext(parts)
            except _replica_errors():
                continue
            response = StreamingResponse(_rest(parts), head.status)
            response.raw_headers = [*head.headers]
            return response
        return failure(RequestError("the replicas were lost; try again", status=503), request.url.path)


def _replica_errors() -> tuple[type[Exception], ...]:
    from ray.exceptions import RayActorError

    return (RayActorError,)


async def _rest(parts: Any) -> AsyncIterator[bytes]:
    """The parts after the head; the replica's work ends if the client leaves."""
    try:
        async for part in parts:
            yield part
    finally:
        parts.cancel()


@dataclass(frozen=True)
class Deployment:
    """`model`: as the nodes find it. `replicas` None: one for each node. `host`, `port`: of the head node."""

    model: str
    loading: Mapping[str, Any]
    options: ServerOptions
    host: str
    port: int
    replicas: int | None = None


class RayServer:
    """Deploys replicas; they end with `close`, or with the program.

    Raises `EdgeInferError`: Ray isn't installed, there is no cluster, or the replicas can't start.
    """

    def __init__(self, address: str, deployment: Deployment) -> None:
        self._ray = connected(address, REQUESTED_BY)
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        self._serve = serve
        nodes = [one for one in self._ray.nodes() if one["Alive"] and one["Resources"].get("CPU", 0) > 0]
        self.replicas = deployment.replicas or len(nodes)
        self._was_running = _is_serving(serve)
        serve.start(
            proxy_location="HeadOnly", http_options={"host": deployment.host, "port": deployment.port}
        )
        try:
            serve.run(_application(deployment, self.replicas, nodes), name=APPLICATION, route_prefix="/")
        except (RuntimeError, ValueError) as error:
            reason = _reason(self._serve, error)
            self.close()
            raise EdgeInferError(f"{REQUESTED_BY}: the replicas can't start ({reason})") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the replicas, and Ray Serve if nothing else runs on it."""
        self._serve.delete(APPLICATION)
        if not self._was_running:
            self._serve.shutdown()
        self._ray.shutdown()


def _is_serving(serve: Any) -> bool:
    """Whether Ray Serve has applications already."""
    return any(name != APPLICATION for name in serve.status().applications)


def _application(deployment: Deployment, replicas: int, nodes: list[Any]) -> Any:
    """The gateway over the replicas, of which a node has one. A replica reserves the resources that the
    smallest node has, because its engine uses a whole node.
    """
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    smallest = {name: min(one["Resources"].get(name, 0) for one in nodes) for name in ("CPU", "GPU")}
    copies = serve.deployment(
        Replica,
        num_replicas=replicas,
        max_replicas_per_node=1 if replicas <= len(nodes) else None,
        max_ongoing_requests=deployment.options.max_waiting,
        ray_actor_options={"num_cpus": smallest["CPU"], "num_gpus": smallest["GPU"]},
        request_router_config=RequestRouterConfig(
            request_router_class=prefix_router(),
            request_router_kwargs={
                "imbalanced_threshold": MORE_REQUESTS,
                "do_eviction": True,
                "eviction_threshold_chars": TREE_CHARACTERS,
                "eviction_target_chars": TREE_CHARACTERS * 9 // 10,
            },
        ),
    ).bind(deployment.model, dict(deployment.loading), deployment.options)
    gateway = serve.deployment(
        Gateway, max_ongoing_requests=GATEWAY_REQUESTS, ray_actor_options={"num_cpus": 0}
    )
    return gateway.bind(copies)


def prefix_router() -> str:
    """Where Ray's prefix-aware router is. Raises `EdgeInferError`: this release of Ray has none."""
    for module in PREFIX_MODULES:
        with contextlib.suppress(ImportError):
            if hasattr(importlib.import_module(module), PREFIX_ROUTER):
                return f"{module}:{PREFIX_ROUTER}"
    raise EdgeInferError(f"{REQUESTED_BY}: this release of Ray has no {PREFIX_ROUTER}; {INSTALL}")


def _reason(serve: Any, error: Exception) -> str:
    """The last line of what Ray Serve says of the replicas: the error of the constructor."""
    messages = [str(error)]
    application = serve.status().applications.get(APPLICATION)
    if application is not None:
        messages += [one.message for one in application.deployments.values() if one.message]
    lines = [line.strip() for message in messages for line in message.splitlines() if "Error: " in line]
    return lines[-1][:300] if lines else " ".join(messages[0].split())[:300]


def server_options(key: str | None, waiting: int, hosts: tuple[str, ...]) -> ServerOptions:
    """The options of each replica's application; requests are logged by Ray Serve."""
    return replace(ServerOptions(), key=key, max_waiting=waiting, hosts=hosts)
