"""The costs of forwards and of drafts, which are measured when a model is first loaded."""

import time

from edgeinfer.engine.protocols import Engine
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.draft_costs import MAX_DRAFTED, MAX_ROWS, MeasuredCosts
from edgeinfer.speculation.drafter import Drafter, DraftRequest
from edgeinfer.speculation.trees.tree_pass import TreePass

MEASURED_ROWS = (1, MAX_DRAFTED + 1, 4, 2, 6, 3, 5, 7)
"""Row counts of the forwards that are timed when a model is first loaded, each after a warm-up. Unmeasured
ones are interpolated linearly, though on a GPU further rows cost in steps."""
TREE_ROWS = (MAX_ROWS, 12)
"""Those of forwards that verify trees, which are timed too if the drafter makes some."""
DRAFTS_MEASURED = 4
MEASURING_SECONDS = 0.15
"""No further measurement starts after this time."""


class CostMeasurement:
    """Measures a model and its drafter; `tree_width`: how many candidates trees have after a token, 1: drafts
    are chains.
    """

    def __init__(self, engine: Engine, drafter: Drafter, tree_width: int) -> None:
        self._engine, self._drafter, self._tree_width = engine, drafter, tree_width

    def measure(self) -> MeasuredCosts:
        """Measure forwards and drafts, on an engine with an empty cache, which is empty again afterwards."""
        passes = self._measured_forwards()
        self._process(MAX_DRAFTED)  # a drafter may have to know the text
        short, long = (self._fastest_draft(length) for length in (1, MAX_DRAFTED))
        if short is None or long is None or long[0] <= short[0]:
            return MeasuredCosts(passes, long[1] / long[0] if long else None)
        each = max(0.0, (long[1] - short[1]) / (long[0] - short[0]))
        fixed = max(0.0, short[1] - short[0] * each)
        return MeasuredCosts(passes, each, fixed, self._measured_short_token(each, fixed))

    def _measured_forwards(self) -> dict[int, float]:
        """Seconds of the fastest forward of each number of rows that is measured in time."""
        spent, passes = 0.0, dict[int, float]()
        longest = 1 + TreePass.max_nodes(self._engine) if self._tree_width > 1 else 0
        trees = [rows for rows in TREE_ROWS if rows <= longest]
        for rows in (*MEASURED_ROWS[:1], *trees, *MEASURED_ROWS[1:]):
            if spent > MEASURING_SECONDS:
                break
            forwards = self._forwards(rows, MEASURING_SECONDS / (2 * len(MEASURED_ROWS)))
            passes[rows] = min(forwards[1:])
            spent += passes[rows] + sum(forwards[1:])
        return passes

    def _measured_short_token(self, each: float, fixed: float) -> float | None:
        """Seconds of a draft token of the short vocabulary, if there is one; `each`: of one of all rows, and
        `fixed`: of a draft, independent of its length.
        """
        vocabulary = self._drafter.short_vocabulary
        draft = self._fastest_draft(MAX_DRAFTED, vocabulary) if vocabulary else None
        if draft is None:
            return None
        tokens, seconds = draft
        # Reading fewer bytes saves no more than these, however disturbed the measurements are.
        return max(each * self._drafter.short_cost, (seconds - fixed) / tokens)

    def _fastest_draft(self, length: int, vocabulary: int = 0) -> tuple[int, float] | None:
        """Tokens and seconds of the fastest of several drafts, the first of which runs with cold caches;
        None: nothing was drafted.
        """
        nodes = length if self._tree_width > 1 else 0
        params = SamplingParams(temperature=0)
        request = DraftRequest(length, params, max_nodes=nodes, vocabulary=vocabulary)
        drafts = list[tuple[float, int]]()
        for _ in range(DRAFTS_MEASURED):
            begin = time.perf_counter()
            draft = self._drafter.propose([0] * MAX_DRAFTED, request)
            made = max(draft.made, draft.depth) if draft.ids else 0
            drafts.append((time.perf_counter() - begin, made))
        seconds, tokens = min(drafts)
        return (tokens, seconds) if tokens else None

    def _forwards(self, rows: int, seconds: float) -> list[float]:
        """Seconds of several forwards: at least two, at most ten, and no further one after `seconds`, not
        counting the first. The first compiles or captures what is missing, so that no completion waits for
        it.
        """
        durations = list[float]()
        while len(durations) < 2 or (len(durations) < 10 and sum(durations[1:]) < seconds):
            start = time.perf_counter()
            self._process(rows)
            durations.append(time.perf_counter() - start)
        return durations

    def _process(self, rows: int) -> None:
        """One forward of this many tokens, which are then dropped."""
        ids = [0] * min(rows, self._engine.context)
        if self._engine.append_best(ids) is None:
            self._engine.append_all(ids)
        self._engine.rewind(0)
