"""Ray clusters of several nodes on this machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

OBJECT_STORE_BYTES = 100 << 20
ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("", "kernels", "offload", "quant_formats", "tui")


@dataclass
class RayMachines:
    """`cluster`: of `ray.cluster_utils`; its nodes are in the order in which they were added."""

    address: str
    cluster: Any

    def remove_last(self) -> None:
        """Kill the processes of the last node."""
        self.cluster.remove_node(self.cluster.list_all_nodes()[-1], allow_graceful=False)


@contextmanager
def ray_machines(count: int, cpus: int = 1) -> Iterator[RayMachines]:
    """A cluster of `count` nodes; its workers import this project's sources."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(str(ROOT / folder) for folder in SOURCES))
        patch.setenv("RAY_DISABLE_IMPORT_WARNING", "1")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        options = {"num_cpus": cpus, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=options)
        try:
            for _ in range(count - 1):
                cluster.add_node(num_cpus=cpus, object_store_memory=OBJECT_STORE_BYTES)
            cluster.wait_for_nodes()
            yield RayMachines(cluster.address, cluster)
        finally:
            if ray.is_initialized():
                ray.shutdown()
            cluster.shutdown()
