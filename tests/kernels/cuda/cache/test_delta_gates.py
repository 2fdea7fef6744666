"""The gated norm of a decode step's delta rule, as activations and as floats, and the rows that it keeps."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.gated_delta_net import GatedDeltaNetSpec
from edgeinfer_kernels.cuda.blocks.gated_delta_net import KEPT_PIECE, net_config
from edgeinfer_kernels.cuda.cache.recurrent_states import state_args, state_config
from edgeinfer_kernels.cuda.decode.workspace import Activations
from edgeinfer_kernels.cuda.prefill.prefill import chunk_words
from edgeinfer_kernels.cuda.triton_ops.recurrent.delta_gates import gate_step_kernel
from edgeinfer_kernels.cuda.weights.plane_formats import padded_blocks
from edgeinfer_kernels.recurrent_state import RecurrentState, RecurrentStep

Floats = npt.NDArray[np.float32]
EPSILON, START, STEP = 1e-6, 62, RecurrentStep(2, 1, 3)
"""The ring has 64 rows: the third token is the first one in it."""


def decoded(activations: torch.Tensor) -> Floats:
    """(tokens, columns): the values of activations of 12 planes, with the padding."""
    words = activations.cpu().numpy()
    tokens, _, blocks = words.shape
    codes = np.ascontiguousarray(words[:, :8].transpose(0, 2, 1)).view(np.int8).astype(np.float32)
    scales = words[:, 8:10].view(np.float32).transpose(0, 2, 1)
    values = codes.reshape(tokens, blocks, 2, 16) * scales[..., None]
    index = np.arange(blocks)
    order = index % 8 * (blocks // 8) + index // 8
    result: Floats = values[:, order].reshape(tokens, -1)
    return result


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 32), (2, 48), (2, 24)])
def test_a_step_gates_its_results_and_keeps_its_rows(
    device: str, heads: int, head_dim: int, tokens: int
) -> None:
    """Heads that aren't a multiple of sixteen elements have floats as results."""
    spec = GatedDeltaNetSpec(heads, heads, head_dim, 4, NormSpec("rms", EPSILON), slots=4)
    shape, width, random = spec.recurrent, heads * head_dim, np.random.default_rng(3)
    values, z = (random.standard_normal((tokens, width)).astype(np.float32) for _ in range(2))
    weight = random.standard_normal(head_dim).astype(np.float32)
    rows = random.standard_normal((tokens, shape.row_width)).astype(np.float32)
    reference = shape.allocate()
    reference.ring[:] = random.standard_normal(reference.ring.shape)
    reference.slots[:] = random.standard_normal(reference.slots.shape)
    state = RecurrentState(
        shape, *(torch.from_numpy(each.copy()).to(device) for each in (reference.ring, reference.slots))
    )
    of_heads = values.reshape(tokens, heads, head_dim)
    normed = of_heads / np.sqrt((of_heads**2).mean(axis=-1, keepdims=True) + EPSILON) * weight
    expected = normed.reshape(tokens, width) * z / (1 + np.exp(-z))
    reference.write(STEP, START, rows)

    is_direct, blocks = head_dim % 16 == 0, padded_blocks(width)
    words = torch.full((tokens, 12, blocks), -1, dtype=torch.int32, device=device)
    floats = torch.full((tokens, width), torch.nan, device=device)
    kept = (shape.tail_rows + tokens) * -(-shape.row_width // KEPT_PIECE)
    device_values, device_z, device_weight, device_rows = (
        torch.from_numpy(each).to(device) for each in (values, z, weight, rows)
    )
    gate_step_kernel[(tokens * heads + kept,)](
        device_values, device_z, width, device_weight, EPSILON, words if is_direct else floats,
        device_rows, chunk_words(START, tokens, STEP).to(device), state_args(state), tokens,
        NET=net_config(spec), CONFIG=state_config(shape), BLOCK=KEPT_PIECE,
        OUT=Activations(words, 12, blocks).config if is_direct else None, DEPENDENT=False, num_warps=1,
    )  # fmt: skip

    result = decoded(words) if is_direct else floats.cpu().numpy()
    largest = np.abs(expected).max()
    assert np.abs(result[:, :width] - expected).max() <= largest * (1 / 127 if is_direct else 1e-5)
    assert not result[:, width:].any()
    tail = shape.tail_rows * shape.tail_width
    target = state.slots.cpu().numpy()
    assert np.array_equal(target[STEP.target, :tail], reference.slots[STEP.target, :tail])
    assert np.array_equal(np.delete(target, STEP.target, 0), np.delete(reference.slots, STEP.target, 0))
    assert np.array_equal(state.ring.cpu().numpy(), reference.ring)
