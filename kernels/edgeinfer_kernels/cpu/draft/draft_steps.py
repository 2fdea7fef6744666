"""Drafts of a draft head, and the steps of its target that verify them: the part of `CpuBackend` for both."""

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import Activations, Backend
from edgeinfer_kernels.blocks.embedding.medusa_head import LOGITS
from edgeinfer_kernels.caches.state_rows import StateRows
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.decoder import CpuDecoder
from edgeinfer_kernels.cpu.draft.draft_cycles import DraftCycles, VerifyingRun
from edgeinfer_kernels.cpu.draft.draft_loop import DraftLoop, has_plain_ends
from edgeinfer_kernels.cpu.draft.hidden_states import KeptStates, NormedStates, TakenStates, own_state
from edgeinfer_kernels.cpu.embedding import Embedding
from edgeinfer_kernels.cpu.layout.packed_matrix import float_rows
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs
from edgeinfer_kernels.cpu.runtime.schedule import (
    BestTokens,
    HeadOutput,
    Run,
    StepSchedules,
    fill_step,
    quick_address,
)
from edgeinfer_kernels.cpu.runtime.thread_pool import ThreadPool
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_kernels.draft_loop import CyclesRequest, DraftCycle, DraftedTokens, DraftRequest
from edgeinfer_kernels.main_memory import MainMemoryBackend


class DraftSteps(MainMemoryBackend[Activations]):
    """Drafts in the draft loop, alone or in runs with the steps that verify them, the tokens that such a step
    finds, and the hidden states that a target hands out and a head takes.
    """

    spec: DecoderSpec
    weights: DecoderWeights
    batch: int
    pool: ThreadPool
    decoder: CpuDecoder
    _kernels: Kernels
    _embedding: Embedding
    _schedules: StepSchedules
    _kept: KeptStates
    _x: Activations
    """The hidden states of a step."""
    _head: int
    """The address of the head's arguments; 0: there is none."""
    _output: HeadOutput
    _best: BestTokens | None
    _step_run: Run
    """The schedule from the embedding to the logits."""
    _best_runs: list[Run]
    """That from the embedding to the best tokens."""
    _best_calls: list[tuple[int, int]]
    """The head, and what finds the best tokens."""
    _step_args: StepArgs
    _step_address: int
    _step_ids_address: int

    def _fill_whole(self, ids: Sequence[int], start: int, span: int = 0) -> None:
        """Fill the arguments of a schedule from the embedding to the head."""
        raise NotImplementedError

    def _touch_recent(self, start: int, tokens: int) -> None:
        """Give the step's positions slots for f16, if the caches have them."""
        raise NotImplementedError

    def _forget_drafts(self) -> None:
        """What drafts and hidden states need is built when it is first used."""
        self._draft_loop: DraftLoop | None = None
        self._draft_cycles: DraftCycles | None = None
        self._verifying_run: VerifyingRun | None = None
        self._taken_states: TakenStates | None = None
        self._normed_states: NormedStates | None = None

    def keep_hidden(self, layers: Sequence[int]) -> None:
        self._kept = KeptStates(self.spec.hidden_size, layers, len(self.spec.layers), self.batch)

    def kept_hidden(self, tokens: int) -> list[Activations]:
        return self._kept.rows(self._x, tokens)

    def set_hidden(self, states: Activations | StateRows, start: int) -> None:
        self._taken().take(states, start)

    def _taken(self) -> TakenStates:
        if self._taken_states is None:
            self._taken_states = TakenStates(self.decoder, self.batch)
        return self._taken_states

    def set_own_hidden(self, x: Activations, start: int) -> None:
        self._taken().take_own(x, start)

    def medusa_logits(self, states: Activations, head: int) -> npt.NDArray[np.float32]:
        x = self._x[: len(states), : self.spec.hidden_size]
        x[:] = states
        self.forward_layers(x, 0, [head])
        at, stride = self.decoder.workspace.rows(LOGITS)
        return float_rows(at, len(x), stride // 4)[:, : self.spec.vocabulary_size].copy()

    def best_ids(self, ids: Sequence[int], start: int, parents: Sequence[int] = ()) -> list[int]:
        """As `Backend.best_ids`, of a chain in one run of the thread pool."""
        assert self._best is not None
        if parents or self._kept.inner:
            x = self.embed(ids)
            if parents:
                self.forward_tree(x, start, parents)
            else:
                self.forward(x, start)
            fill_step(self._step_args, quick_address(x), x.strides[0], len(ids), 0, 0)
            runs = [(*call, self._step_address) for call in self._best_calls]
        else:
            self._fill_whole(ids, start)
            runs = self._best_runs
        self._output.args.logits = self._best.logits
        for run in runs:
            self.pool.run(*run)
        return self._best.first(len(ids))

    @property
    def _can_draft(self) -> bool:
        """Whether the draft loop has a kernel for each of its steps."""
        return bool(self._head and self._embedding.block) and has_plain_ends(self.spec, self.weights)

    @property
    def _runs_cycles(self) -> bool:
        """Whether Python has nothing to do between two drafts, or between two steps that verify them."""
        state, decoder = self.state, self.decoder
        is_plain = state.slots is None and state.recent is None
        is_in_memory = decoder.windows is None and decoder.stream is None
        if not (self._can_draft and is_plain and is_in_memory):
            return False
        if not decoder.sizes.is_draft_head:
            return self._best is not None
        return decoder.sizes.drafts_pairs and self._taken().in_place is not None

    def draft(self, ids: Sequence[int], start: int, request: DraftRequest) -> DraftedTokens:
        """As `Backend.draft`, in one run of the thread pool."""
        self._touch_recent(start, len(ids) + len(request.min_probs))
        return self._loop().run(self.pool, ids, start, self._limited(request))

    def _limited(self, request: DraftRequest) -> DraftRequest:
        """The request for the rows of the output that are computed."""
        limit = self._output.vocabulary
        return request if request.id_limit <= limit else request._replace(id_limit=limit)

    def _loop(self) -> DraftLoop:
        if self._draft_loop is None:
            block, steps = self._embedding.block, self._step_run[1:]
            head = self._step_args, self._output.args
            slots, rows, own = self.state.slots, self.weights.output_ids, own_state(self.decoder)
            self._draft_loop = DraftLoop(
                self.spec, self._kernels, self._schedules, steps, block, head, slots, rows, own
            )
        return self._draft_loop

    def draft_cycles(
        self,
        target: Backend[Activations],
        ids: Sequence[int],
        start: int,
        request: DraftRequest,
        run: CyclesRequest,
    ) -> list[DraftCycle]:
        """As `Backend.draft_cycles`, in one run of the thread pool."""
        if getattr(target, "pool", None) is not self.pool:  # `isinstance` takes 10 us for a protocol's class
            raise ValueError(f"saw a target on the {target.name} backend, wanted one of the same thread pool")
        taken = self._taken()
        if self._draft_cycles is None:
            assert taken.in_place is not None
            self._draft_cycles = DraftCycles(
                self._kernels, self._loop(), taken.in_place, self._schedules.stride
            )
        step = cast(DraftSteps, target).begin_cycles(run, 1 + len(request.min_probs))
        states = taken.address_of(run.states)
        return self._draft_cycles.run(self.pool, step, ids, start, self._limited(request), run, states)

    def begin_cycles(self, run: CyclesRequest, tokens: int) -> VerifyingRun:
        """Prepare the first step of a run whose steps have at most `tokens` tokens."""
        assert self._best is not None
        if self._verifying_run is None:
            self._verifying_run = VerifyingRun(
                self.decoder.arena,
                self._schedules,
                self._best_runs[0],
                self._step_ids_address,
                (self._step_args, self._output.args),
                self._best.args,
            )
        self._fill_whole([run.token], run.start, run.max_cycles * tokens)
        self._output.args.logits = self._best.logits
        return self._verifying_run

    def limit_output(self, rows: int) -> None:
        """As `Backend.limit_output`."""
        self._output.limit(rows)
        if self._best:
            self._best.args.vocabulary = rows

    def write_draft_states(self, x: Activations, out: StateRows) -> None:
        if self._normed_states is None and self._head:
            norm, width = self._output.args.norm, self.spec.hidden_size
            self._normed_states = NormedStates(self._kernels, norm, width)
        if self._normed_states is None or not self._normed_states.write(x, out):
            super().write_draft_states(x, out)
