"""The draft loop without Python between tokens: prepares the data of the loop in
`native/draft/draft_loop.py`.
"""

import math
from collections.abc import Sequence
from ctypes import Array, addressof, c_float, c_int64

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.layout.packed_matrix import Arena, address
from edgeinfer_kernels.cpu.runtime.abi import LOGITS_PER_PART, MAX_CANDIDATES, MAX_DRAFT_TOKENS
from edgeinfer_kernels.cpu.runtime.block_args import DraftArgs, DraftStepArgs, EmbedArgs, HeadArgs, LogitsPart
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs
from edgeinfer_kernels.cpu.runtime.schedule import StepSchedules, fill_step
from edgeinfer_kernels.cpu.runtime.thread_pool import ThreadPool
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_kernels.draft_loop import DraftedTokens, DraftRequest, DraftSampling
from edgeinfer_kernels.recurrent_state import StateSlots

WIDEST_REACH = 80.0
"""Candidates are at most this many nats below the largest logit."""
TokenIds, Probs = c_int64 * MAX_DRAFT_TOKENS, c_float * MAX_DRAFT_TOKENS
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


def draft_step_args(schedules: StepSchedules) -> "Array[DraftStepArgs]":
    """The calls of a step, whose positions a kernel changes."""
    args = (DraftStepArgs * len(schedules.step_args))()
    for draft_args, (table, step_args) in zip(args, schedules.step_args, strict=True):
        draft_args.step, draft_args.rope_bytes = addressof(step_args), table.stride
    return args


def has_plain_ends(spec: DecoderSpec, weights: DecoderWeights) -> bool:
    """Whether the loop can continue with the embedding of a token, and its logits are plain."""
    is_plain = has_plain_logits(spec, weights)
    return is_plain and not spec.per_layer_width and not spec.has_raw_draft_states


def has_plain_logits(spec: DecoderSpec, weights: DecoderWeights) -> bool:
    """Whether the logits need only a scale after the head."""
    return not spec.logit_soft_cap and weights.output_bias is None


class DraftLoop:
    """The draft loop of one backend, with its output buffers.

    `steps`: all steps of a token, from its embedding (`embed`, an EmbedArgs) to the head, as their address
    and count. `head`: the step arguments of the head, and those of its block. `row_ids`: the ids of the rows
    of the output matrix; `own`: the address and the number of the elements of a state that is kept.
    """

    def __init__(
        self,
        specification: DecoderSpec,
        kernels: Kernels,
        schedules: StepSchedules,
        steps: tuple[int, int],
        embed: int,
        head: tuple[StepArgs, HeadArgs],
        slots: StateSlots | None,
        row_ids: Integers | None = None,
        own: tuple[int, int] = (0, 0),
    ) -> None:
        self._slots, self._row_ids = slots, row_ids
        self._arena, self._function = Arena(), kernels.address("draft_tokens")
        self._schedules, (self._head_step, self._head) = schedules, head
        self._embed = EmbedArgs.from_address(embed)
        self._logits = np.zeros(padded(specification.vocabulary_size), np.float32)
        # Lists are copied to and from arrays of ctypes in half the time of numpy's.
        self._given, self._ids = TokenIds(), TokenIds()
        self._min_probs, self._min_probs_to_continue = Probs(), Probs()
        self._probs, self._uniforms = Probs(), Probs()
        self._counts = np.zeros(MAX_DRAFT_TOKENS, np.int64)
        self._candidates = np.zeros((MAX_DRAFT_TOKENS, MAX_CANDIDATES), np.int64)
        self._weights = np.zeros((MAX_DRAFT_TOKENS, MAX_CANDIDATES), np.float32)
        self.block = self._fill(specification.logit_scale, steps, embed)
        self._args = DraftArgs.from_address(self.block)
        self._args.row_ids, (self._args.own, self._args.own_columns) = self._arena.keep(row_ids), own
        self._logits_address, self.given = address(self._logits), addressof(self._given)
        """The addresses of the logits and of the given tokens."""
        self._uniforms_address = addressof(self._uniforms)
        self._sampling: DraftSampling | None = None

    def _fill(self, logit_scale: float, steps: tuple[int, int], embed: int) -> int:
        """Allocate the arguments of the loop."""
        keep, keep_args = self._arena.keep, self._arena.keep_args
        return self._arena.fill(
            DraftArgs,
            schedule=steps[0],
            steps=steps[1],
            embed=embed,
            step_args=keep_args(draft_step_args(self._schedules)),
            step_arg_count=len(self._schedules.step_args),
            head_step=addressof(self._head_step),
            x=self._schedules.x,
            logits=keep(self._logits),
            logit_scale=logit_scale,
            parts=keep_args((LogitsPart * -(-len(self._logits) // LOGITS_PER_PART))()),
            min_probs=keep_args(self._min_probs),
            min_probs_to_continue=keep_args(self._min_probs_to_continue),
            candidates=keep(self._candidates),
            weights=keep(self._weights),
            candidate_counts=keep(self._counts),
            sorted_logits=keep(np.zeros(MAX_CANDIDATES, np.float32)),
            ids=keep_args(self._ids),
            probs=keep_args(self._probs),
        )

    def begin(self, ids: Sequence[int], start: int, request: DraftRequest, span: int = 0) -> None:
        """Set the arguments of a draft after at most MAX_DRAFT_TOKENS ids; `span`: as of
        `StepSchedules.fill`, if drafts for further tokens follow in the same run.
        """
        args, given, max_tokens = self._args, len(ids), len(request.min_probs)
        if not 0 < given <= MAX_DRAFT_TOKENS or not 0 < max_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(
                f"{given} tokens, {max_tokens} draft tokens; wanted 1 to {MAX_DRAFT_TOKENS} of each"
            )
        if request.sampling is not self._sampling or request.id_limit != args.id_limit:
            self._choose(request.id_limit, request.sampling)
        schedules = self._schedules
        schedules.fill(given, start, span=max(span, given + max_tokens))
        if self._slots is not None:
            schedules.fill_slots(self._slots.begin(start, given))
        last = schedules.x + (given - 1) * schedules.stride
        fill_step(self._head_step, last, schedules.stride, 1, 0, 0)
        self._head.logits = self._logits_address
        self._embed.ids = self.given
        self._given[:given], self._min_probs[:max_tokens] = list(ids), list(request.min_probs)
        to_continue = request.min_probs_to_continue or [0.0] * max_tokens
        self._min_probs_to_continue[:max_tokens] = list(to_continue)
        if request.uniforms:
            self._uniforms[:max_tokens] = list(request.uniforms)
        args.uniforms = self._uniforms_address if request.uniforms else 0
        args.max_tokens, args.count, args.is_running, args.reached = max_tokens, 0, 1, 1.0

    def run(self, pool: ThreadPool, ids: Sequence[int], start: int, request: DraftRequest) -> DraftedTokens:
        """As `Backend.draft`, for at most MAX_DRAFT_TOKENS ids and draft tokens."""
        args, given = self._args, len(ids)
        self.begin(ids, start, request)
        pool.run(self._function, self.block, 0)
        count = args.count
        if self._slots is not None:
            self._slots.extend(args.forwards - 1)
        return DraftedTokens(
            self._ids[:count],
            self._probs[:count],
            given + args.forwards - 1,
            self._candidates_of(count) if request.uniforms else (),
        )

    def _choose(self, id_limit: int, sampling: DraftSampling) -> None:
        """Set the sampling parameters of the following drafts."""
        reach, args = -math.log(sampling.min_p) if sampling.min_p > 0 else WIDEST_REACH, self._args
        args.id_limit, args.temperature = id_limit, sampling.temperature
        args.top_k, args.top_p, args.reach = sampling.top_k, sampling.top_p, min(reach, WIDEST_REACH)
        self._sampling = sampling

    def _candidates_of(self, found: int) -> tuple[tuple[Integers, Floats], ...]:
        """The ids of the candidates of each draft token, ascending, and their weights."""
        counts = self._counts[:found].tolist()
        rows = [
            (self._candidates[step, :n].copy(), self._weights[step, :n].copy())
            for step, n in enumerate(counts)
        ]
        if self._row_ids is None:
            return tuple(rows)
        ids = [(self._row_ids[each], weights) for each, weights in rows]
        return tuple((each[order := np.argsort(each)], weights[order]) for each, weights in ids)
