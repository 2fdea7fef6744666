"""What a run over experts that change places tells of its tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer_kernels.expert_routing import PairCounts
from edgeinfer_offload.planner import planner
from edgeinfer_offload.runtime.split_backend import SplitBackend
from harness import expert_cache_runs
from harness.expert_cache_runs import HEAD, changing_rows


class Choosing(SplitBackend):
    """Asks for four experts a token, one of them the host's."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []

    @property
    def pairs(self) -> PairCounts:
        return PairCounts(4 * len(self.read), len(self.read))

    def choose(self, token_id: int, start: int, *others: object, **more: object) -> int:
        self.read.append((token_id, start))
        return 0


def test_both_placements_are_run_over_each_kind_of_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    worths, backends = [], []

    @contextmanager
    def loaded(path: Path, **options: Any) -> Iterator[Any]:
        worths.append(planner.CHANGING_WORTH)
        assert options["vram"] == 1000 + 500
        backends.append(Choosing())
        engine = NativeEngine.__new__(NativeEngine)
        engine.backend = backends[-1]
        layer = SimpleNamespace(changing=planner.CHANGING_WORTH > 1)
        yield SimpleNamespace(engine=engine, plan=SimpleNamespace(layers=[layer]))

    def ids(count: int, vocabulary: int, seed: int) -> Sequence[int]:
        return list(range(seed, seed + count))

    monkeypatch.setattr(expert_cache_runs, "load", loaded)
    monkeypatch.setattr(expert_cache_runs, "random_ids", ids)
    monkeypatch.setattr(expert_cache_runs, "overhead", lambda *arguments: 1000)
    monkeypatch.setattr(expert_cache_runs, "placed", lambda plan: "placed")
    monkeypatch.setattr(
        expert_cache_runs, "model_sizes", lambda path: SimpleNamespace(nbytes=1000, vocabulary=9)
    )
    monkeypatch.setattr(expert_cache_runs, "TOKENS", 20)
    monkeypatch.setattr(expert_cache_runs, "SHOWN", 10)
    usual = planner.CHANGING_WORTH
    rows = list(changing_rows(Path("some/mixture.gguf"), 0.5, 64, None))
    assert usual == planner.CHANGING_WORTH
    assert worths == [0.0, float("inf")]
    assert [row[2:5] for row in rows] == [
        [f"placed, {name}", routing, span]
        for name in ("staying", "changing")
        for routing in ("even", "few", "others")
        for span in ("0-10", "10-20")
    ]
    assert {len(row) for row in rows} == {len(HEAD)}
    assert {row[-1] for row in rows} == {"75%"}
    even, few = backends[0].read[:20], backends[0].read[20:40]
    assert even == [(7 + i, i) for i in range(20)]
    assert few == [(11 + i % 6, i) for i in range(20)]
