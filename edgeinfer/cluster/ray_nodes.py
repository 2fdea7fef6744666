"""The nodes of a Ray cluster, each with an actor that has the engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from edgeinfer.cluster.node_engine import NodeEngine
from edgeinfer.cluster.node_requests import Node, NodeLostError
from edgeinfer.cluster.ray_library import connected
from edgeinfer.serving.app import ServerOptions

REQUESTED_BY = "--ray"
STARTS_PER_NODE = 3
"""Engines that are started on a node, the first one included; more would end for the same reason."""
ENGINE_CALLS = 256
"""Calls that an actor runs at once."""
EngineFactory = Callable[[], Any]


class RayNode:
    """A `Node`. `resources`: what the node has in all; its engine takes all, because it uses all cores and
    GPUs.
    """

    def __init__(self, ray: Any, name: str, engine: Any) -> None:
        self.name = name
        self._ray, self._engine = ray, engine

    async def start(self) -> str:
        return str(await self._call(self._engine.ready))

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        status, text = await self._call(self._engine.post, path, body)
        return status, text

    async def _call(self, method: Any, *values: Any) -> Any:
        try:
            return await method.remote(*values)
        except self._ray.exceptions.RayActorError as error:
            raise NodeLostError(str(error)) from error

    def end(self) -> None:
        """End the engine's process."""
        self._ray.kill(self._engine)


class RayCluster:
    """A `Cluster`. `engine`: the class of the engine and the values for its constructor.

    Raises `EdgeInferError`: Ray isn't installed, or there is no cluster at the address.
    """

    def __init__(self, address: str, engine: type, *values: Any) -> None:
        self._ray = connected(address, REQUESTED_BY)
        self._class, self._values = engine, values
        self._nodes: dict[str, RayNode] = {}
        self._starts: dict[str, int] = {}

    @property
    def size(self) -> int:
        """Number of nodes now."""
        return len(self._alive())

    def _alive(self) -> dict[str, Mapping[str, Any]]:
        """Node id -> what Ray says of it."""
        return {
            str(one["NodeID"]): one
            for one in self._ray.nodes()
            if one["Alive"] and one["Resources"].get("CPU", 0) > 0
        }

    def joined(self) -> Sequence[Node]:
        new = [
            (node_id, one)
            for node_id, one in self._alive().items()
            if node_id not in self._nodes and self._starts.get(node_id, 0) < STARTS_PER_NODE
        ]
        for node_id, one in new:
            self._starts[node_id] = self._starts.get(node_id, 0) + 1
            self._nodes[node_id] = self._started(node_id, one)
        return [self._nodes[node_id] for node_id, _ in new]

    def _started(self, node_id: str, one: Mapping[str, Any]) -> RayNode:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        resources = one["Resources"]
        actor = self._ray.remote(self._class).options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=ENGINE_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        name = f"node {one['NodeManagerAddress']} ({node_id[:6]})"
        return RayNode(self._ray, name, actor.remote(*self._values))

    def lost(self, node: Node) -> None:
        for node_id, one in list(self._nodes.items()):
            if one is node:
                del self._nodes[node_id]

    def close(self) -> None:
        for node in self._nodes.values():
            node.end()
        self._nodes.clear()
        self._ray.shutdown()


def engine_cluster(address: str, model: str | None, loading: Mapping[str, Any], waiting: int) -> RayCluster:
    """A cluster whose nodes run models. `waiting`: requests that a node may queue."""
    options = replace(ServerOptions(), max_waiting=waiting)
    return RayCluster(address, NodeEngine, model, dict(loading), options)
