"""Compiles the kernels of draft heads for a GPU that needn't be there, and prints their resources."""

import sys
from dataclasses import replace

import numpy as np
import torch

from edgeinfer.shapes.shape import Shape
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.embedding.assistant_input import AssistantInputSpec, AssistantInputWeights
from edgeinfer_kernels.blocks.embedding.draft_input import DraftInputSpec, DraftInputWeights
from edgeinfer_kernels.blocks.embedding.draft_keys import DraftKeysSpec, DraftKeysWeights
from edgeinfer_kernels.blocks.embedding.eagle_input import EagleInputSpec, EagleInputWeights
from edgeinfer_kernels.blocks.embedding.fused_states import FusedStatesSpec, FusedStatesWeights
from edgeinfer_kernels.blocks.embedding.medusa_head import MedusaHeadSpec, MedusaHeadWeights
from edgeinfer_kernels.cuda.decode.captured_steps import CapturedSteps
from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.device_parts import DeviceOptions, DeviceParts
from edgeinfer_kernels.cuda.draft.block_backend import BlockSteps
from edgeinfer_kernels.cuda.draft.draft_steps import DraftSteps
from edgeinfer_kernels.cuda.draft.medusa_backend import MedusaSteps
from edgeinfer_kernels.cuda.draft.promptless_head import HeadParts
from edgeinfer_kernels.cuda.draft.states.state_ring import StateRing
from edgeinfer_kernels.cuda.draft.target import HeadTarget
from edgeinfer_kernels.cuda.draft.verification.next_draft import NextTokens
from edgeinfer_kernels.cuda.draft.verification.started_step import StartedVerification
from edgeinfer_kernels.cuda.found_tokens import FoundTokens
from edgeinfer_kernels.cuda.tuning.step_shapes import usual_tuning
from edgeinfer_kernels.cuda.tuning.targets import compile_launch, recorded_launches
from edgeinfer_kernels.decoder import (
    DecoderSpec,
    DecoderWeights,
    LayerSpec,
    LayerWeights,
    ResidualBlock,
    ResidualWeights,
)
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.sizes.cuda_buffers import KEPT_STATES
from harness.empty_decoders import NORM, empty_decoder

POSITIONS, CHUNK = 4096, 512
WIDTH, VOCABULARY = 2560, 124_160
NAMES = {
    "keep_states_kernel",
    "draft_pair_kernel",
    "draft_pair_rows_kernel",
    "draft_slices_kernel",
    "draft_token_kernel",
    "level_slices_kernel",
    "level_candidates_kernel",
    "target_states_kernel",
    "eagle_pair_kernel",
    "eagle_state_rows_kernel",
    "eagle_pair_rows_kernel",
    "medusa_hidden_kernel",
    "append_keys_kernel",
    "assistant_pair_kernel",
}


def head_decoder(kind: str, norm: NormSpec) -> tuple[DecoderSpec, DecoderWeights]:
    """A head of the width and the drafted vocabulary of Qwen3.5 4B."""
    shape = Shape("small", 1, WIDTH, 9216, 16, 4, VOCABULARY, POSITIONS, head_dim=256)
    spec, weights = empty_decoder(shape, kind)
    (layer,), (layer_weights,) = spec.layers, weights.layers
    formats = layer_weights.blocks[0].block.attn_q.format
    projection = Matrix("eh_proj", formats, WIDTH, 2 * WIDTH, np.zeros((1, 1), np.uint8))
    gain = np.ones(WIDTH, np.float32)
    first = ResidualWeights(DraftInputWeights(projection, gain, gain))
    return (
        replace(spec, layers=(LayerSpec((ResidualBlock(DraftInputSpec(norm), norm), *layer.blocks)),)),
        replace(weights, layers=(LayerWeights((first, *layer_weights.blocks)),)),
    )


def eagle_decoder(kind: str, norm: NormSpec) -> tuple[DecoderSpec, DecoderWeights]:
    """An EAGLE-3 head of this width with a table of ids; quantized ones normalize the target's states."""
    spec, weights = head_decoder(kind, norm)
    has_norm = kind != "F16"
    gain, feature_gain = np.ones(WIDTH, np.float32), np.ones(3 * WIDTH, np.float32)
    (_, attention, *others), (first, own, *rest) = spec.layers[0].blocks, weights.layers[0].blocks

    def matrix(rows: int, columns: int) -> Matrix:
        return Matrix("pairs", first.block.eh_proj.format, rows, columns, np.zeros((1, 1), np.uint8))

    projections = {
        name: matrix(getattr(own.block, name).rows, 2 * WIDTH) for name in ("attn_q", "attn_k", "attn_v")
    }
    pair = replace(own, norm=None, block=replace(own.block, **projections))
    fused = EagleInputWeights(matrix(WIDTH, 3 * WIDTH), gain, gain, feature_gain if has_norm else None)
    reading = replace(
        attention, block=replace(attention.block, pair_input=True), norm_name="", shares_input=True
    )
    start = ResidualBlock(EagleInputSpec(norm, 3 * WIDTH, has_norm, has_norm), norm)
    layer = LayerWeights((ResidualWeights(fused), pair, *rest))
    return (
        replace(spec, layers=(LayerSpec((start, reading, *others)),)),
        replace(weights, layers=(layer,), output_ids=np.arange(VOCABULARY)),
    )


def launch_all(
    spec: DecoderSpec, weights: DecoderWeights, capability: int, states: StateRing, *, dependent: bool
) -> None:
    """Steps of a target that keeps its states, and drafts and chunks of its head."""
    options = DeviceOptions(target=HeadTarget(None, None, states.rows))
    parts = DeviceParts.take(spec, weights, POSITIONS, Arena(), capability, options)
    tuning = usual_tuning(capability)
    step = DecodeStep(StepLaunches(parts.model, parts.workspace, tuning, dependent=dependent))
    parts.workspace.kept = states
    for tokens in (1, 2, 8, 16):
        step.launch(tokens)
    parts.workspace.kept = None
    steps = CapturedSteps(step, parts.sampling)
    verification = StartedVerification(
        steps, FoundTokens(steps, parts.sampling), steps.sequence, lambda: None
    )
    drafts = DraftSteps(steps, parts.sampling, verification)
    NextTokens(steps, verification, drafts.captured, lambda: None).launch(3, 4)
    drafts.launch_first(4)
    drafts.launch_further(6)
    drafts.launch_root(4)
    drafts.launch_level(8)
    parts.prefill.kept = states
    parts.prefill.read(CHUNK, 0)


def block_decoder(kind: str) -> tuple[DecoderSpec, DecoderWeights]:
    """A block drafter of this width with one layer, after five layers of its target."""
    spec, weights = head_decoder(kind, NORM)
    (_, attention, *others), (first, own, *rest) = spec.layers[0].blocks, weights.layers[0].blocks
    fc = Matrix("fc", first.block.eh_proj.format, WIDTH, 5 * WIDTH, np.zeros((1, 1), np.uint8))
    block = replace(attention.block, whole_step=True)
    inputs = FusedStatesSpec(NORM, 5 * WIDTH), DraftKeysSpec(block, 1)
    fused = ResidualWeights(FusedStatesWeights(fc, np.ones(WIDTH, np.float32)))
    keys = ResidualWeights(DraftKeysWeights(own.block))
    layers = (
        LayerSpec(tuple(ResidualBlock(each, NORM) for each in inputs)),
        LayerSpec((replace(attention, block=block), *others)),
    )
    of_layers = LayerWeights((fused, keys)), LayerWeights((own, *rest))
    return replace(spec, layers=layers), replace(weights, layers=of_layers)


def launch_blocks(kind: str, capability: int, states: torch.Tensor, *, dependent: bool) -> None:
    """Steps and a chunk of keys, and blocks."""
    spec, weights = block_decoder(kind)
    options = DeviceOptions(target=HeadTarget(None, None, states))
    parts = DeviceParts.take(spec, weights, POSITIONS, Arena(), capability, options)
    launches = StepLaunches(parts.model, parts.workspace, usual_tuning(capability), dependent=dependent)
    steps = BlockSteps(CapturedSteps(DecodeStep(launches), parts.sampling), parts.sampling)
    for tokens in (1, 8, 16):
        steps.launch_keys(tokens)
        steps.launch_block(tokens)
    parts.prefill.keep_layers((0,))
    parts.prefill.read(CHUNK, 0)


def medusa_decoder(kind: str) -> tuple[DecoderSpec, DecoderWeights]:
    """A Medusa head of this width."""
    spec, weights = head_decoder(kind, NORM)
    form = weights.layers[0].blocks[0].block.eh_proj.format
    linear, output = (
        Matrix("medusa", form, rows, WIDTH, np.zeros((1, 1), np.uint8)) for rows in (WIDTH, VOCABULARY)
    )
    own = ResidualWeights(MedusaHeadWeights(linear, np.ones(WIDTH, np.float32), output))
    layer = LayerSpec((ResidualBlock(MedusaHeadSpec(VOCABULARY), NORM),))
    weights = replace(weights, output_norm=None, layers=(LayerWeights((own,)),))
    return replace(spec, layers=(layer,)), weights


def launch_medusa(kind: str, capability: int, states: torch.Tensor, *, dependent: bool) -> None:
    """A draft of a Medusa head."""
    spec, weights = medusa_decoder(kind)
    parts = HeadParts(spec, weights, POSITIONS, Arena(), HeadTarget(None, None, states))
    MedusaSteps(parts, usual_tuning(capability), dependent=dependent).launch(1)


def launch_assistant(kind: str, capability: int, states: torch.Tensor, *, dependent: bool) -> None:
    """A draft of an assistant of this width for a target of the same, whose embedding is its own here."""
    spec, weights = head_decoder(kind, NORM)
    (_, *layer), (pair, *others) = spec.layers[0].blocks, weights.layers[0].blocks
    pre = pair.block.eh_proj
    post = replace(pre, rows=WIDTH, columns=WIDTH)
    first = ResidualBlock(AssistantInputSpec(WIDTH), NORM)
    own = ResidualWeights(AssistantInputWeights(pre, post))
    spec = replace(spec, layers=(LayerSpec((first, *layer)),))
    weights = replace(weights, layers=(LayerWeights((own, *others)),))
    parts = HeadParts(spec, weights, POSITIONS, Arena(), HeadTarget(None, None, states))
    launches = StepLaunches(parts.model, parts.workspace, usual_tuning(capability), dependent=dependent)
    drafts = DraftSteps(CapturedSteps(DecodeStep(launches), parts.sampling), parts.sampling)
    drafts.launch_first(1)
    drafts.launch_further(1)


def main() -> None:
    capability = int(sys.argv[1])
    own, after, fused = (torch.empty((KEPT_STATES, count * WIDTH), device="meta") for count in (1, 3, 5))
    rings = (head_decoder, StateRing(own)), (eagle_decoder, StateRing(after, (0, 1, 1)))
    with recorded_launches() as launches:
        for kind in ("Q4_0", "Q8_0", "F16"):
            for decoder, ring in rings:
                launch_all(*decoder(kind, NORM), capability, ring, dependent=capability >= 90)
            launch_medusa(kind, capability, own, dependent=capability >= 90)
            launch_blocks(kind, capability, fused, dependent=capability >= 90)
            launch_assistant(kind, capability, own, dependent=capability >= 90)
    for launch in launches:
        if launch.name in NAMES:
            print(launch.name, compile_launch(launch, capability), flush=True)


if __name__ == "__main__":
    main()
