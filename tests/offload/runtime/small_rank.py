"""A rank without a model, which the tests of rank processes start: it executes simple commands."""

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from edgeinfer_offload.runtime.rank_service import run_rank


class SmallRank:
    """Its job is its number, or the text of an error."""

    each_replies = frozenset(("double",))

    def __init__(self, job: int | str, on_progress: Callable[[int, int], None]) -> None:
        if isinstance(job, str):
            raise ValueError(job)
        self.rank = job
        on_progress(1, 2)
        self._calls = 0

    def ready(self) -> int:
        return self.rank

    def double(self, number: int) -> int:
        self._calls += 1
        return 2 * number + self.rank

    def count(self) -> int:
        return self._calls

    def length(self, data: bytes) -> int:
        return len(data)

    def fail(self, ranks: list[int]) -> None:
        """Raise on these ranks; the others wait for them."""
        if self.rank in ranks:
            raise ValueError(f"no such thing\nin rank {self.rank}")
        self.hang([self.rank])

    def hang(self, ranks: list[int]) -> None:
        while self.rank in ranks:
            threading.Event().wait()

    def die(self, rank: int, text: str) -> None:
        if self.rank == rank:
            print(text, file=sys.stderr, flush=True)
            os.abort()
        self.hang([self.rank])

    def nothing(self) -> Any:
        return None


if __name__ == "__main__":
    run_rank(SmallRank)
