"""Decode steps captured as CUDA graphs, one per token count and sampling mode, and replayed."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgeinfer_kernels.backend import PAGE, BatchPositions
from edgeinfer_kernels.cuda.cache.layout import BATCH, PAGES, TEXT, Layout, first_tokens
from edgeinfer_kernels.cuda.cache.sequences import DeviceSequences
from edgeinfer_kernels.cuda.current_device import capturing
from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
from edgeinfer_kernels.cuda.decode.sampling import advance_kernel, argmax, sample, sample_best_kernel
from edgeinfer_kernels.cuda.decode.workspace import ROWS
from edgeinfer_kernels.cuda.device_parts import SamplingSpace, synchronize
from edgeinfer_kernels.cuda.draft.captured_launches import CapturedLaunches
from edgeinfer_kernels.cuda.offload.cpu_stages import DecodeExchange, Host
from edgeinfer_kernels.cuda.offload.expert_loading import ExpertCache
from edgeinfer_kernels.cuda.trees.tree_words import tree_places
from edgeinfer_kernels.cuda.tuning.step_compiling import OnCompiled, compile_steps
from edgeinfer_kernels.cuda.tuning.step_timer import fast_widths, replay_seconds
from edgeinfer_kernels.cuda.weights.per_layer_rows import PerLayerRows
from edgeinfer_kernels.sizes.cuda_buffers import (
    COMMON_STEP_SIZES,
    FIRST_BIT,
    MASKS_AT,
    MAX_TOKENS,
    PATH_AT,
    POSITIONS_AT,
    POWER_AT,
    SEQUENCE_WORDS,
    SEQUENCES_AT,
    STATE_WORDS,
)

ALL_BEFORE = tuple((2 << token) - 1 for token in range(MAX_TOKENS))
"""The masks of tokens that attend to themselves and to the earlier ones."""
REPLAYS = 4
"""How often a step is run, one after another, while it is timed, and the number of timings."""
RING = 64
"""Maximum number of sampled tokens between the device and the host."""
NONE, BEST, SAMPLE = "none", "best", "draw"
"""Sampling mode after a step's logits: none, argmax, or random sampling."""


class CapturedSteps:
    """Runs steps on the current stream; without CUDA it launches their kernels one by one.

    `sampled` (RING,) int32, in host-readable memory: the id sampled after the token at each position.
    """

    def __init__(
        self, step: DecodeStep, sampling: SamplingSpace, sequences: DeviceSequences | None = None
    ) -> None:
        self.step = step
        self._sequences = sequences or DeviceSequences(1, step.model.context, 0)
        self.sequence = self._sequences.each[0]
        """The sequence of steps that aren't batches."""
        self.recent = step.model.recent
        """The recent positions of the caches."""
        self.power = 1.0
        """Of the probabilities of a draft head's tree."""
        self._sampling_space = sampling
        self._device = step.workspace.state.device
        self.per_layer = PerLayerRows(step.model.per_layer, step.workspace.spaces.values(), self._device)
        self._cuda = self._device.type == "cuda"
        self._graphs: dict[tuple[int, str, Layout, bool], torch.cuda.CUDAGraph] = {}
        self._best_of_each = CapturedLaunches(self._device)
        """The argmax after each token of a step, by their number: apart from the step, maybe of a tree."""
        self._start, self._is_tree = 0, False
        self.times_set = 0
        """How often the words of a step, or the pages of a chunk, were set."""
        self._widths: tuple[int, ...] = COMMON_STEP_SIZES
        self.host: Host | None = None
        """The CPU shard of a split model."""
        self.expert_cache: ExpertCache | None = None
        """The expert cache, which changes the experts between two steps."""
        self.meets_in_graph = self._cuda
        """Whether the device can wait for the host within a graph."""
        count = len(self._sequences.each)
        self._next_words = torch.zeros(
            (count, RING, SEQUENCE_WORDS), dtype=torch.int32, pin_memory=self._cuda
        )
        self._state = torch.zeros(STATE_WORDS, dtype=torch.int32, pin_memory=self._cuda)
        self._words = self._state.numpy()
        self._powers = self._words.view(np.float32)
        pages = step.workspace.pages
        self._pages = [torch.zeros_like(pages, device="cpu", pin_memory=self._cuda) for _ in range(2)]
        self._batches = [torch.zeros_like(self._state, pin_memory=self._cuda) for _ in range(2)]
        """Two of each, by turns: the device may still read those of the batch before."""
        self._turn = 0
        self._spare_page = pages.shape[1] - 1
        """The page for the keys and values of padding."""
        self.sampled: Tensor = torch.zeros(RING, dtype=torch.int32, pin_memory=self._cuda)

    def width(self, tokens: int) -> int:
        """The token count of the step that evaluates `tokens` tokens; the rest is padding."""
        return self._widths[bisect_left(self._widths, tokens)]

    @property
    def widths(self) -> tuple[int, ...]:
        """The token counts of steps."""
        return self._widths

    def use_widths(self, widths: tuple[int, ...]) -> None:
        """All later steps have these token counts, the last of which is MAX_TOKENS."""
        self._widths = widths

    def set_state(
        self,
        ids: Sequence[int],
        start: int,
        before: Sequence[int] = (),
        pages: npt.NDArray[np.int64] | None = None,
        *,
        whole: bool = False,
        set_tokens: int = 0,
    ) -> None:
        """Set the step's tokens, of `sequence`, or of one in these `pages`: each token attends to itself and
        the earlier ones, to the `whole` step, or of a tree to those `before` it, as in `tree_places`. Padding
        tokens follow, at the positions where the keys and values of the next tokens will be written. The
        device has already set `set_tokens` of the ids after the first.
        """
        tokens, words = len(ids), self._words
        self._start, self.times_set = start, self.times_set + 1
        self._is_tree = bool(before) and self.sequence.slots is not None
        # At once, in the order of the words: each assignment to an array takes a microsecond or more.
        places, padding = range(start, start + MAX_TOKENS), [ids[-1]] * (MAX_TOKENS - tokens)
        words[:POWER_AT] = [*ids, *padding, *places, *ALL_BEFORE, start, 0, self.sequence.states_at]
        self._powers[POWER_AT] = self.power
        words[PATH_AT + 1 : PATH_AT + 1 + MAX_TOKENS] = 0
        if whole:
            words[MASKS_AT : MASKS_AT + tokens] = (1 << tokens) - 1
        if before:
            words[PATH_AT + 1 : PATH_AT + 1 + tokens] = [1 + row for row in before]
            positions, masks = tree_places(start, before)
            words[POSITIONS_AT : POSITIONS_AT + tokens] = positions
            words[MASKS_AT : MASKS_AT + tokens] = masks
        of_sequence = self.sequence.words(start, tokens, is_tree=bool(before))
        words[SEQUENCES_AT : SEQUENCES_AT + len(of_sequence)] = of_sequence
        self._set_own_pages(start, self.width(tokens), pages)
        parts = (slice(1), slice(1 + set_tokens, None)) if set_tokens else (slice(None),)
        for part in parts:
            self.step.workspace.state[part].copy_(self._state[part], non_blocking=True)
        self.per_layer.send(ids)

    def set_chunk(self, start: int, tokens: int, pages: npt.NDArray[np.int64] | None = None) -> Tensor | None:
        """Set the pages of a chunk of a prompt of `sequence`, or of one in these `pages`, and return them;
        None: it isn't in pages.
        """
        self.times_set += 1
        is_paged = self._set_own_pages(start, tokens, pages)
        return self.step.workspace.pages[0] if is_paged else None

    def _set_own_pages(self, start: int, tokens: int, pages: npt.NDArray[np.int64] | None = None) -> bool:
        """Set the pages of one sequence, as `set_chunk`; return whether it is in pages."""
        if pages is None and self.sequence.layout == PAGES:
            pages = self.sequence.pages(start + tokens)
        if pages is not None:
            self.set_pages(pages[None])
        if self.recent is not None:
            self.recent.touch(start, tokens, pages)
        return pages is not None

    def set_pages(self, pages: npt.NDArray[np.int64], count: int = 1) -> None:
        """Set the pages (sequences, pages) of the first sequences; those of padding, up to `count`, and what
        follows are the spare page.
        """
        self._turn = 1 - self._turn
        (rows, columns), held = pages.shape, self._pages[self._turn]
        count, table = max(rows, count), held.numpy()
        table[:count, : columns + 1] = self._spare_page
        table[:rows, :columns] = pages
        self.step.workspace.pages[:count].copy_(held[:count], non_blocking=True)

    def set_batch(self, ids: Sequence[int], positions: BatchPositions, sequences: Sequence[int] = ()) -> None:
        """Set the step's tokens, consecutive ones of each sequence, but not the rows of their per-layer
        embeddings; `sequences`: the numbers of those that have separate states. Padding tokens are alone in
        the spare page.
        """
        count, self._is_tree = self.width(len(ids)), False
        self.times_set += 1
        self.set_pages(positions.pages[:, : int(positions.positions.max()) // PAGE + 1], count)
        if self.recent is not None:
            self.recent.touch_batch(positions)
        held = self._batches[self._turn]
        state = held.numpy()
        state[: len(ids)], state[len(ids) : count] = ids, ids[-1]
        at = state[POSITIONS_AT : POSITIONS_AT + count]
        at[: len(ids)], at[len(ids) :] = positions.positions, 0
        firsts = np.arange(count)
        firsts[: len(ids)] = first_tokens(positions)
        masks = state[MASKS_AT : MASKS_AT + count]
        masks[:] = (2 << (np.arange(count) - firsts)) - 1 | firsts << FIRST_BIT
        if sequences:
            words = self._sequences.batch([int(start) for start in positions.positions], sequences)
            words += [self._sequences.padding] * (count - len(ids))
            state[SEQUENCES_AT:].reshape(-1, SEQUENCE_WORDS)[:count, : len(words[0])] = words
        self.step.workspace.state.copy_(held, non_blocking=True)

    def set_next(self, start: int) -> None:
        """Set the slots of recurrent states, and the pages, for a step of one token, which is set by the step
        before it.
        """
        self.times_set += 1
        if self.sequence.slots is not None:
            set_words = self.sequence.words(start, 1)
            words = self._next_words[self.sequence.number, start % RING, : len(set_words)]
            words[:] = torch.tensor(set_words, dtype=torch.int32)
            at = SEQUENCES_AT
            self.step.workspace.state[at : at + len(words)].copy_(words, non_blocking=True)
        if start % PAGE == 0:
            self._set_own_pages(start, 1)

    def run(self, tokens: int, mode: str = NONE, layout: Layout | None = None) -> None:
        """Run a step of the tokens in `state`, by default of `sequence`; in a split model including its CPU
        stages.
        """
        layout = layout or self.sequence.layout
        if self.step.exchange:
            self._run_split(tokens, mode, self.step.exchange, layout)
        elif not self._cuda:
            self._launch(self.width(tokens), mode, layout)
        else:
            self._graph(self.width(tokens), mode, layout).replay()

    def find_best(self, tokens: int) -> None:
        """Find the argmax after each token of the last step."""
        width = self.width(tokens)
        self._best_of_each.run(width, partial(self._launch_best, width))

    def _launch_best(self, tokens: int) -> None:
        space = self._sampling_space
        argmax(self.step.workspace.logits[:tokens], space.buffers, space.sampled, space.results)

    def _graph(self, tokens: int, mode: str, layout: Layout = TEXT) -> torch.cuda.CUDAGraph:
        key = tokens, mode, layout, self._is_tree
        return self._graphs.get(key) or self._capture(tokens, mode, layout)

    def _run_split(self, tokens: int, mode: str, exchange: DecodeExchange, layout: Layout) -> None:
        """The previous step must be complete, on both sides."""
        assert self.host is not None
        exchange_buffer, host, start = exchange.exchange_buffer, self.host, self._start
        if self.expert_cache is not None:
            self.expert_cache.before_step(tokens)
        if not self.meets_in_graph:
            self._launch_with_host(tokens, mode, exchange, host, layout)
            if self.expert_cache is not None:
                self.expert_cache.after_launch()
            return
        graph = self._graph(self.width(tokens), mode, layout)
        exchange_buffer.begin(answered=0 if exchange.stages.stages[0] else 1)
        graph.replay()
        if self.expert_cache is not None:
            self.expert_cache.after_launch()
        host.serve(tokens, start)
        exchange_buffer.check()

    def warm_up(
        self,
        widths: tuple[int, ...] = COMMON_STEP_SIZES,
        on_compiled: OnCompiled | None = None,
        layouts: Sequence[Layout] = (TEXT,),
    ) -> None:
        """Compile and capture steps of these token counts, as `use_widths`. `layouts`: of the steps."""
        self.use_widths(widths)
        if not self._cuda:
            return
        compile_steps(self.step, widths, on_compiled, layouts)
        texts = [layout for layout in layouts if layout != BATCH]
        variants = [(1, mode, layout) for layout in texts for mode in (BEST, SAMPLE)]
        variants += [(width, NONE, layout) for layout in layouts for width in widths]
        for width, mode, layout in variants:
            if (width, mode, layout, False) not in self._graphs:
                self.set_state([0] * width, 0)
                self.set_pages(np.full((width, 1), self._spare_page))
                self._capture(width, mode, layout)

    def warm_up_drafts(self) -> None:
        """Capture what verifies drafts: the argmax after each token, and the steps of trees if they differ
        from others. Token counts that are slower than a larger one are padded to it from now on.
        """
        if self._cuda and self.step.exchange is None and self.step.collective is None:
            one, *more = self._widths
            self.use_widths((one, *fast_widths(self._seconds_of(more))))
        for width in self._widths:
            self._best_of_each.prepare(width, partial(self._launch_best, width))
        if not self._cuda or self.sequence.slots is None:
            return
        for width in self._widths[1:]:
            self.set_state([0] * width, 0, [-1] + [0] * (width - 1))
            self._graph(width, NONE)
        self._is_tree = False

    def _seconds_of(self, widths: Sequence[int]) -> dict[int, float]:
        """Seconds of a step of each number of tokens after an empty text. They are timed in turns: while the
        GPU's clock rises, those timed first would look slower.
        """
        fastest = dict.fromkeys(widths, math.inf)
        for _ in range(1 + REPLAYS):
            for width in widths:
                self.set_state([0] * width, 0)
                graph = self._graph(width, NONE)
                fastest[width] = min(fastest[width], replay_seconds(graph, REPLAYS))
        return fastest

    def forget(self) -> None:
        """Capture steps again from now on, because the tile configs have changed."""
        self._graphs.clear()

    def _launch_with_host(
        self, tokens: int, mode: str, exchange: DecodeExchange, host: Host, layout: Layout
    ) -> None:
        """Launch kernels one by one; the CPU shard runs each stage when all earlier work is complete."""
        start = self._start

        def run_stage(stage: int) -> None:
            synchronize(self._device)
            host.run_stage(stage, tokens, start)

        exchange.exchange_buffer.open()
        exchange.between = run_stage
        try:
            self._launch(self.width(tokens), mode, layout)
        finally:
            exchange.between = None

    def _launch(self, tokens: int, mode: str, layout: Layout = TEXT) -> None:
        collective = self.step.collective
        peers = None if collective is None else collective.logit_peers
        self.step.layout, self.step.is_tree = layout, self._is_tree
        self.step.gathers_logits = mode != BEST or peers is None
        self.step.launch(tokens)
        self.step.layout, self.step.is_tree, self.step.gathers_logits = TEXT, False, True
        space, sampling = self.step.workspace, self._sampling_space
        if mode == BEST and peers is not None:
            self.step.launches.ranks.best_of_ranks(peers, self.sampled, RING)
        elif mode == BEST and collective is None:
            self.step.launches.launch(
                sample_best_kernel,
                (1,),
                space.best,
                space.best_ids,
                space.state,
                self.sampled,
                PROGRAMS=self.step.model.head.shapes.padded_rows // ROWS,
                RING=RING,
                warps=8,
            )
        elif mode == SAMPLE:
            logits = space.logits[:1]
            sample(
                logits,
                sampling.requests,
                sampling.recent,
                sampling.buffers,
                sampling.sampled,
                sampling.results,
            )
            advance_kernel[(1,)](sampling.results, space.state, self.sampled, RING=RING)
        elif mode == BEST:  # The ranks' logits are gathered: their programs' largest ones aren't.
            argmax(space.logits[:1], sampling.buffers, sampling.sampled, sampling.results)
            advance_kernel[(1,)](sampling.results, space.state, self.sampled, RING=RING)

    def _capture(self, tokens: int, mode: str, layout: Layout) -> torch.cuda.CUDAGraph:
        """Compile and capture a step. The warm-up writes only to positions after the cached tokens.

        The inputs in x, or in the exchange buffer, are restored before the graph is replayed.
        """
        space, exchange = self.step.workspace, self.step.exchange
        rows = exchange.exchange_buffer.rows[:tokens].clone() if exchange else None
        if exchange:
            exchange.exchange_buffer.open()
        state, x = space.state.clone(), space.x.clone()
        self._launch(tokens, mode, layout)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with capturing(self._device, graph):
            self._launch(tokens, mode, layout)
        space.state.copy_(state)
        space.x.copy_(x)
        if exchange and rows is not None:
            exchange.exchange_buffer.rows[:tokens].copy_(rows)
        self._graphs[tokens, mode, layout, self._is_tree] = graph
        return graph
