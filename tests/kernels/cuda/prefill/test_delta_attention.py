"""The recurrence of Kimi Delta Attention with decays of any strength, and rows that are processed again."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.gated_delta_net import DELTA_POSITIONS, pairs_size
from edgeinfer_kernels.blocks.kimi_delta_attention import KimiDeltaAttentionSpec
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import RING_ROWS
from edgeinfer_kernels.cuda.blocks.gated_delta_net import STEP_COLUMNS, STEP_WARPS, net_config
from edgeinfer_kernels.cuda.cache.recurrent_states import (
    keep_chunk_rows,
    state_args,
    state_config,
)
from edgeinfer_kernels.cuda.prefill.prefill import chunk_words
from edgeinfer_kernels.cuda.triton_ops.recurrent.gated_delta_net import (
    DecayVectors,
    ProjectedRows,
    delta_chunk_kernel,
    delta_convolution_kernel,
    delta_step_kernel,
)
from edgeinfer_kernels.cuda.triton_ops.recurrent.kimi_delta_attention import delta_key_pairs_kernel
from edgeinfer_kernels.decoder import BlockIndex
from edgeinfer_kernels.recurrent_state import RecurrentState, RecurrentStep
from edgeinfer_kernels.reference.blocks.gated_delta_net import delta_rule
from edgeinfer_kernels.reference.step import BlockStep

Array = npt.NDArray[np.float32]
Decays = Callable[[np.random.Generator, tuple[int, int]], npt.NDArray[np.float64]]
SPEC = KimiDeltaAttentionSpec(3, 32, 3, NormSpec("rms", 1e-5), slots=4)
NET = net_config(SPEC, key_decay=True)
PROMPT_STEPS = (
    (0, 37, RecurrentStep(0, 0, 1)),
    (37, 20, RecurrentStep(0, 1, 2)),
    (45, 26, RecurrentStep(8, 1, 3)),
    (48, 3, RecurrentStep(11, 1, 2)),
)
"""Start, tokens and slots; the last two process positions again whose rows are in the ring."""
DECODE_STEPS = (
    (0, 5, RecurrentStep(0, 0, 1)),
    (5, 12, RecurrentStep(0, 1, 2)),
    (13, 8, RecurrentStep(8, 1, 3)),
    (16, 3, RecurrentStep(11, 1, 2)),
)
"""The same with fewer tokens, which a decode step processes one by one."""
DECAYS: dict[str, Decays] = {
    "none": lambda random, shape: np.zeros(shape),
    "weak": lambda random, shape: -random.uniform(0, 1e-3, shape),
    "strong": lambda random, shape: -random.uniform(50, 400, shape),
    "of all strengths": lambda random, shape: -np.exp(random.uniform(-12, 7, shape)),
    "strong at one position of many": lambda random, shape: np.where(
        np.arange(shape[0])[:, None] % 11 == 5, -800.0, -random.uniform(0, 0.1, shape)
    ),
}


@dataclass(frozen=True)
class Weights:
    taps: Array


@dataclass(frozen=True)
class Inputs:
    qkv: Array
    beta: Array
    g: Array

    @classmethod
    def of(cls, random: np.random.Generator, tokens: int, decays: Decays) -> "Inputs":
        qkv = random.standard_normal((tokens, SPEC.channels)).astype(np.float32)
        beta = random.uniform(0, 1, (tokens, SPEC.heads)).astype(np.float32)
        return cls(qkv, beta, decays(random, (tokens, SPEC.result_width)).astype(np.float32))

    def rows(self, device: str) -> torch.Tensor:
        """The rows of the state, of which only g is there."""
        rows = np.full((len(self.qkv), SPEC.recurrent.row_width), np.nan, np.float32)
        rows[:, SPEC.channels + padded(SPEC.heads) :] = self.g
        return torch.from_numpy(rows).to(device)

    def projected(self, device: str) -> ProjectedRows:
        """q, k, v, and what becomes β."""
        rows = np.concatenate([self.qkv, np.log(self.beta / (1 - self.beta))], axis=1)
        projected = torch.from_numpy(rows).to(device)
        return ProjectedRows(projected, projected, projected.stride(0))


def evaluated(
    device: str,
    inputs: Inputs,
    taps: Array,
    state: RecurrentState,
    start: int,
    step: RecurrentStep,
    is_prompt: bool,
) -> Array:
    """(tokens, width): the results of the kernels of a prompt or of a decode step; the state is written."""
    tokens, rows = len(inputs.qkv), inputs.rows(device)
    words, args = chunk_words(start, tokens, step).to(device), state_args(state)
    sizes: dict[str, Any] = {"NET": NET, "CONFIG": state_config(SPEC.recurrent)}
    conv = torch.full(((tokens + RING_ROWS) * SPEC.channels,), torch.nan, device=device)
    values = torch.full((tokens, SPEC.result_width), torch.nan, device=device)
    pairs = torch.full((pairs_size(SPEC, tokens),), torch.nan, device=device)
    flat = torch.from_numpy(taps.reshape(-1)).to(device)
    delta_convolution_kernel[(tokens + RING_ROWS, 3 * SPEC.heads + 1)](
        inputs.projected(device), DecayVectors(flat, flat), rows, words, args, flat, conv, SPEC.norm.epsilon,
        **sizes, BETA_AT=SPEC.channels, ALPHA_AT=0, SCALED=False, DEPENDENT=False, num_warps=1,
    )  # fmt: skip
    if is_prompt:
        delta_key_pairs_kernel[(-(-(tokens + RING_ROWS) // DELTA_POSITIONS), SPEC.heads)](
            rows, conv, words, args, pairs, **sizes, COUNT=DELTA_POSITIONS, num_warps=4
        )
        delta_chunk_kernel[(SPEC.heads, 1)](
            rows, conv, words, args, pairs, values,
            **sizes, COLUMNS=32, COUNT=DELTA_POSITIONS, num_warps=8,
        )  # fmt: skip
    else:
        delta_step_kernel[(SPEC.heads, SPEC.head_dim // STEP_COLUMNS)](
            rows, conv, words, args, values,
            **sizes, COLUMNS=STEP_COLUMNS, DEPENDENT=False, num_warps=STEP_WARPS,
        )  # fmt: skip
    keep_chunk_rows(rows, words, state, tokens)
    result: Array = values.cpu().numpy()
    return result


def distance(actual: Array, expected: Array) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("is_prompt", [True, False], ids=["prompt", "step"])
@pytest.mark.parametrize("decays", DECAYS)
def test_the_recurrence_equals_the_formula(device: str, decays: str, is_prompt: bool) -> None:
    random = np.random.default_rng(6)
    taps = random.standard_normal((SPEC.taps, SPEC.channels)).astype(np.float32)
    shape = SPEC.recurrent
    reference = shape.allocate()
    ring = torch.zeros((RING_ROWS, shape.row_width), device=device)
    state = RecurrentState(shape, ring, torch.zeros((shape.slots, shape.slot_width), device=device))
    for start, tokens, step in PROMPT_STEPS if is_prompt else DECODE_STEPS:
        inputs = Inputs.of(random, tokens, DECAYS[decays])
        qkv, weights = inputs.qkv, Weights(taps)
        block = BlockStep(
            BlockIndex(0, 0), SPEC, weights, reference, start, qkv, qkv, np.float64, recurrent=step
        )
        wide = (part.astype(np.float64) for part in (inputs.qkv, inputs.beta, inputs.g))
        expected = delta_rule(block, *wide).reshape(tokens, -1)
        result = evaluated(device, inputs, taps, state, start, step, is_prompt)
        assert distance(result, expected) < 2e-6
        assert distance(state.slots.cpu().numpy()[step.target], reference.slots[step.target]) < 2e-6
