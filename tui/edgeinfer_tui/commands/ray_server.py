"""`edgeinfer serve --ray`: replicas on the nodes of a Ray cluster, until Ctrl-C."""

import signal
import threading
from typing import TYPE_CHECKING

from typer import BadParameter

from edgeinfer_tui import interrupts
from edgeinfer_tui.failures import say
from edgeinfer_tui.system.listening import resolved_address

if TYPE_CHECKING:
    from edgeinfer_tui.commands.serve_command import ServerLimits
    from edgeinfer_tui.options.parsed_options import ParsedOptions


def serve_on_cluster(
    address: str | None,
    models: list[str],
    options: "ParsedOptions",
    listens: tuple[str, int],
    limits: "ServerLimits",
    replicas: int | None,
) -> None:
    """Deploy replicas of one model and wait. `listens`: host and port of the cluster's head node."""
    from edgeinfer.cluster.node_engine import portable_model
    from edgeinfer.cluster.ray_serve import Deployment, RayServer, server_options
    from edgeinfer.serving.transport.access import ANY_HOST, LOCAL_HOSTS

    if address is None:
        raise BadParameter("--replicas is for a cluster; give its address with --ray")
    host, port = listens
    name = portable_model(options.model)
    if len(models) > 1 or name is None:
        raise BadParameter(f"--ray: saw {len(models)} models, wanted one, which every node has")
    if port == 0:
        raise BadParameter("--port 0: Ray Serve selects none; give a port of the head node")
    (_, _, _, _, _), addresses = resolved_address(host, port, limits.key)
    hosts = (ANY_HOST,) if addresses[0].is_unspecified else (*LOCAL_HOSTS, host)
    deployment = Deployment(
        name, options.loading, server_options(limits.key, limits.queue, hosts), host, port, replicas
    )
    interrupts.raise_exception()
    server = RayServer(address, deployment)
    try:
        count = "1 replica" if server.replicas == 1 else f"{server.replicas} replicas"
        say(f"{name} is served by {count} at http://{host}:{port}/v1 of the head node (Ctrl-C ends it)")
        wait_for_ctrl_c()
    finally:
        server.close()
    say("ended")


def wait_for_ctrl_c() -> None:
    """Return after Ctrl-C, or a signal to end."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
