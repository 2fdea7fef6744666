"""Trees of a draft head on a GPU: it finds the candidates after each level there, and the host adds them.

A level is one step of all tokens of the tree that have been evaluated so far. As those of chains, the
candidates don't depend on how the completion is sampled, except for its temperature.
"""

from collections.abc import Sequence

from edgeinfer.speculation.drafter import DraftRequest
from edgeinfer.speculation.heads.draft_head import DraftHead
from edgeinfer.speculation.trees.tree_growth import ROOT, Candidates, TreeGrowth
from edgeinfer_kernels.draft_loop import VerifyingStep


class DeviceHead(DraftHead):
    """A head on the GPU of its target. It drafts from all rows of its output: on an H100 a short vocabulary
    made completions 0 to 2 % faster, which isn't worth other graphs.
    """

    _evaluated: tuple[int, ...] = ()
    """The nodes of the tree that have been evaluated, in the order of their rows."""

    def _verifying_step(self, history: Sequence[int], count: int) -> VerifyingStep | None:
        return self._target.prepare_verification(history, count)

    def _candidates_after(self, history: Sequence[int], request: DraftRequest) -> Candidates | None:
        tokens = self._pending(history)
        if tokens is None:
            return None
        self._position, self._evaluated = self._done + len(tokens), ()
        self._set_states(self._position)
        found = self._found(tokens, self._done, (), request)
        self._done = self._position
        return found[0]

    def _candidates_of(
        self, nodes: Sequence[int], growth: TreeGrowth, history: Sequence[int], request: DraftRequest
    ) -> list[tuple[int, Candidates]]:
        room = self._backend.capabilities.max_tree_tokens - len(self._evaluated)
        added = tuple(nodes)[:room]
        if not added:
            return []
        self._evaluated += added
        rows = {node: row for row, node in enumerate(self._evaluated)} | {ROOT: ROOT}
        parents = [rows[growth.parents[node]] for node in self._evaluated]
        ids = [growth.ids[node] for node in self._evaluated]
        found = self._found(ids, self._position, parents, request)
        return [(node, found[rows[node]]) for node in added]

    def _found(
        self, ids: Sequence[int], start: int, parents: Sequence[int], request: DraftRequest
    ) -> list[Candidates]:
        """The candidates of a step of the head."""
        power = request.sharpness / (request.params.temperature or 1.0)
        found = self._backend.draft_level(ids, start, parents, self.tree_width, power)
        return [[each for each in best if each[0] < self._vocabulary_size] for best in found]
