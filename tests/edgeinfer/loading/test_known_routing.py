"""Hot experts are read from a profile next to the model."""

from pathlib import Path

import numpy as np
import pytest

from edgeinfer.planning.model_plan import model_sizes
from edgeinfer.planning.model_request import known_routing
from edgeinfer_offload.runtime.activity_profile import ActivityProfile, adjacent_profile_path, model_hash
from tests.model_zoo import ZOO


@pytest.fixture
def moe_file(tmp_path: Path) -> Path:
    return ZOO["granitemoe"].write(tmp_path / "mixture.gguf")


def save_counts(path: Path, hot: int) -> None:
    counts = np.full((2, 8), 20, np.uint32)
    counts[:, hot] = 100
    ActivityProfile(
        model_hash(path),
        (100, 100),
        "an expert that the router selected",
        {f"experts.{i}": counts for i in range(3)},
    ).save(adjacent_profile_path(path))


def test_a_profile_next_to_the_model_gives_hot_experts(moe_file: Path) -> None:
    sizes = model_sizes(moe_file)
    assert known_routing(moe_file, sizes) == (None, ())
    save_counts(moe_file, hot=5)
    routing, warnings = known_routing(moe_file, sizes)
    assert warnings == ()
    assert routing is not None
    assert all(max(range(8), key=layer.__getitem__) == 5 for layer in routing)
    assert sum(routing[0]) == pytest.approx(3)


def test_a_profile_of_another_model_gives_a_warning(moe_file: Path, tmp_path: Path) -> None:
    save_counts(moe_file, hot=1)
    other = ZOO["olmoe"].write(tmp_path / "other.gguf")
    adjacent_profile_path(moe_file).rename(adjacent_profile_path(other))
    routing, (warning,) = known_routing(other, model_sizes(other))
    assert routing is None
    assert warning.startswith("all experts count as equally likely: ")
    assert "profile of another model" in warning


def test_a_dense_model_has_no_hot_experts(tmp_path: Path) -> None:
    path = ZOO["llama"].write(tmp_path / "dense.gguf")
    assert known_routing(path, model_sizes(path)) == (None, ())
