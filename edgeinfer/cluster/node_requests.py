"""Requests of a batch over the nodes of a cluster: those of a node that is lost go to another one."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, Self

from edgeinfer.errors import EdgeInferError, shown
from edgeinfer.serving.batch.lines import BatchLine

WATCH_SECONDS = 2.0
"""Seconds between two searches for nodes that have joined."""
PATIENCE_SECONDS = 60.0
"""How long requests wait for a node if none is left."""
MAX_LOSSES = 3
"""Nodes that may be lost during one request: it may be what ends them."""


class NodeLostError(Exception):
    """The node, or the process of its engine, has ended."""


class Node(Protocol):
    """A node of a cluster, with one engine."""

    name: str

    async def start(self) -> str:
        """Load the model; "", or why the node can't run it. Raises `NodeLostError`."""
        ...

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """The status and the body of the response to a request. Raises `NodeLostError`."""
        ...


class Cluster(Protocol):
    """The nodes of a cluster."""

    def joined(self) -> Sequence[Node]:
        """Nodes that have joined since the last call, or whose engine may start again."""
        ...

    def lost(self, node: Node) -> None:
        """The node's engine has ended."""
        ...

    def close(self) -> None:
        """End all engines."""
        ...


class NodeRequests:
    """A `BatchTarget`. `per_node`: requests that a node gets at once; `note`: called with lines for the user.

    A request goes to the node with the fewest requests in progress. If the node is lost, it goes to another
    one; its response is the only one, because the lost node can't give its own any more.
    """

    def __init__(
        self,
        cluster: Cluster,
        per_node: int,
        note: Callable[[str], None],
        watch_seconds: float = WATCH_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._cluster, self._per_node, self._note = cluster, per_node, note
        self._watch_seconds, self._patience_seconds = watch_seconds, patience_seconds
        self._load: dict[Node, int] = {}
        self._starting = 0
        self._failure = ""
        self._empty_since: float | None = None
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def post(self, line: BatchLine) -> tuple[int, bytes]:
        for _ in range(MAX_LOSSES):
            node = await self._free_node()
            try:
                return await node.post(line.url, line.body)
            except NodeLostError:
                await self._lost(node)
            finally:
                await self._release(node)
        raise EdgeInferError(
            f"request {shown(line.custom_id)}: {MAX_LOSSES} nodes were lost during it; it may be too large "
            "for their memory"
        )

    async def _free_node(self) -> Node:
        """The node with the fewest requests, once one has fewer than it may have.

        Raises `EdgeInferError`: no node can run the model, or there is none for too long.
        """
        async with self._changed:
            while True:
                free = min(self._load.items(), key=lambda item: item[1], default=None)
                if free is not None and free[1] < self._per_node:
                    self._load[free[0]] += 1
                    return free[0]
                if self._failure and not self._load and not self._starting:
                    raise EdgeInferError(self._failure)
                try:
                    async with asyncio.timeout_at(self._deadline()):
                        await self._changed.wait()
                except TimeoutError:
                    message = "no node of the cluster is left; the same command continues"
                    raise EdgeInferError(message) from None

    def _deadline(self) -> float | None:
        """When waiting for a node ends; None: there are nodes, which are busy or start."""
        now = asyncio.get_running_loop().time()
        self._empty_since = None if self._load or self._starting else self._empty_since or now
        return None if self._empty_since is None else self._empty_since + self._patience_seconds

    async def _release(self, node: Node) -> None:
        async with self._changed:
            if node in self._load:
                self._load[node] -= 1
                self._changed.notify()

    async def _lost(self, node: Node) -> None:
        """Use a node no more. Each of its requests comes here; the first one reports it."""
        async with self._changed:
            if self._load.pop(node, None) is None:
                return
            self._changed.notify_all()
        self._cluster.lost(node)
        self._note(f"{node.name}: was lost; its requests go to other nodes")

    async def _watch(self) -> None:
        """Start the engines of nodes as they join."""
        while True:
            for node in await asyncio.to_thread(self._cluster.joined):
                self._starting += 1
                self._note(f"{node.name}: loads the model")
                self._task(self._start(node))
            async with self._changed:
                self._changed.notify_all()
            await asyncio.sleep(self._watch_seconds)

    async def _start(self, node: Node) -> None:
        failure = ""
        is_lost = False
        try:
            failure = await node.start()
        except NodeLostError:
            is_lost = True
        async with self._changed:
            self._starting -= 1
            if not failure and not is_lost:
                self._load[node] = 0
            elif failure:
                self._failure = self._failure or f"{node.name}: {failure}"
            self._changed.notify_all()
        if is_lost:
            self._cluster.lost(node)
        self._note(
            f"{node.name}: {'was lost while it loaded the model' if is_lost else failure or 'is ready'}"
        )

    def _task(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def __aenter__(self) -> Self:
        self._task(self._watch())
        return self

    async def __aexit__(self, *_: Any) -> None:
        for task in list(self._tasks):
            task.cancel()
        for task in list(self._tasks):
            with suppress(asyncio.CancelledError):
                await task
        await asyncio.to_thread(self._cluster.close)
