"""The draft loop without Python between tokens: prepares the data of the loop in
`native/blocks/draft_loop.py`.
"""

import math
from collections.abc import Sequence
from struct import pack_into

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.layout.packed_matrix import Arena, address, bits, int_fields
from edgeinfer_kernels.cpu.runtime.abi import (
    EMBED,
    GUESSING,
    HEAD,
    LOGITS_PER_PART,
    MAX_CANDIDATES,
    PART_BYTES,
)
from edgeinfer_kernels.cpu.runtime.schedule import StepSchedules
from edgeinfer_kernels.cpu.runtime.step_args import fill_call
from edgeinfer_kernels.cpu.runtime.thread_pool import ThreadPool
from edgeinfer_kernels.decoder import DecoderSpec
from edgeinfer_kernels.draft_loop import DraftedTokens, DraftRequest, DraftSampling
from edgeinfer_kernels.layer_cache import padded

MAX_GUESSES = 16
WIDEST_REACH = 80.0
"""Candidates are at most this many nats below the largest logit."""
TURN, ONE = "5q", bits(1.0)
"""The fields of GUESSING from `most` on, which are reset before every run."""
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


class DraftLoop:
    """The draft loop of one backend, with its output buffers.

    `steps`: all steps of a token, from its embedding (`embed`, an EMBED) to the head, as their address and
    count. `head`: the head's call structure and its fields.
    """

    def __init__(
        self,
        specification: DecoderSpec,
        kernels: Kernels,
        programs: StepSchedules,
        steps: tuple[int, int],
        embed: int,
        head: tuple[Integers, Integers],
    ) -> None:
        self._arena, self._function = Arena(), kernels.address("guess_tokens")
        self._programs, (self._head_call, self._head) = programs, head
        self._embed = int_fields(embed, len(EMBED))
        size = padded(specification.vocabulary_size)
        self._logits = np.zeros(size, np.float32)
        self._given, self._least = np.zeros(MAX_GUESSES, np.int64), np.zeros(MAX_GUESSES, np.float32)
        self._further = np.zeros_like(self._least)
        self._ids, self._chances = np.zeros_like(self._given), np.zeros_like(self._least)
        self._numbers, self._counts = np.zeros_like(self._least), np.zeros_like(self._given)
        self._candidates = np.zeros((MAX_GUESSES, MAX_CANDIDATES), np.int64)
        self._weights = np.zeros((MAX_GUESSES, MAX_CANDIDATES), np.float32)
        self._call_pairs = np.zeros((len(programs.calls), 2), np.int64)
        self._call_pairs[:, 0] = [address(call) for _, call in programs.calls]
        keep = self._arena.keep
        self._block = self._arena.fill(
            GUESSING,
            program=steps[0],
            steps=steps[1],
            embed=embed,
            calls=keep(self._call_pairs),
            call_count=len(programs.calls),
            head_call=keep(self._head_call),
            x=programs.x,
            logits=keep(self._logits),
            logit_scale=bits(specification.logit_scale),
            parts=keep(np.zeros(-(-size // LOGITS_PER_PART) * PART_BYTES, np.uint8)),
            least=keep(self._least),
            further=keep(self._further),
            candidates=keep(self._candidates),
            weights=keep(self._weights),
            candidate_counts=keep(self._counts),
            sorted_logits=keep(np.zeros(MAX_CANDIDATES, np.float32)),
            ids=keep(self._ids),
            chances=keep(self._chances),
        )
        self._fields = int_fields(self._block, len(GUESSING))
        self._logits_address, self._given_address = address(self._logits), address(self._given)
        self._numbers_address = address(self._numbers)
        self._choice: tuple[int, DraftSampling] | None = None

    def run(self, team: ThreadPool, ids: Sequence[int], start: int, wanted: DraftRequest) -> DraftedTokens:
        """As `Backend.draft`, for at most MAX_GUESSES ids and draft tokens."""
        fields, given, most = self._fields, len(ids), len(wanted.least)
        if not 0 < given <= MAX_GUESSES or not 0 < most <= MAX_GUESSES:
            raise ValueError(f"{given} tokens, {most} guesses; wanted 1 to {MAX_GUESSES} of each")
        if self._choice != (wanted.choices, wanted.manner):
            self._choose(wanted.choices, wanted.manner)
        programs = self._programs
        programs.fill(given, start, span=given + most)
        for index, (table, _) in enumerate(programs.calls):
            self._call_pairs[index, 1] = table.stride
        last = programs.x + (given - 1) * programs.stride
        fill_call(self._head_call, last, programs.stride, 1, 0, 0)
        self._head[HEAD.logits // 8] = self._logits_address
        self._embed[EMBED.ids // 8] = self._given_address
        self._given[:given], self._least[:most] = ids, wanted.least
        self._further[:most] = wanted.further or 0.0
        if wanted.numbers:
            self._numbers[:most] = wanted.numbers
        at = self._numbers_address if wanted.numbers else 0
        pack_into(TURN, fields.data, GUESSING.most, most, at, 0, 1, ONE)
        team.run(self._function, self._block, 0)
        found = int(fields[GUESSING.count // 8])
        return DraftedTokens(
            self._ids[:found].tolist(),
            self._chances[:found].tolist(),
            given + int(fields[GUESSING.passes // 8]) - 1,
            self._drawn_from(found) if wanted.numbers else (),
        )

    def _choose(self, choices: int, manner: DraftSampling) -> None:
        """Set the sampling parameters of the following drafts."""
        reach = -math.log(manner.min_p) if manner.min_p > 0 else WIDEST_REACH
        for name, value in {
            "choices": choices,
            "temperature": bits(manner.temperature),
            "top_k": manner.top_k,
            "top_p": bits(manner.top_p),
            "reach": bits(min(reach, WIDEST_REACH)),
        }.items():
            self._fields[getattr(GUESSING, name) // 8] = value
        self._choice = choices, manner

    def _drawn_from(self, found: int) -> tuple[tuple[Integers, Floats], ...]:
        counts = self._counts[:found].tolist()
        return tuple(
            (self._candidates[step, :count].copy(), self._weights[step, :count].copy())
            for step, count in enumerate(counts)
        )
