"""A block drafter on a GPU: the keys of its target's states, and blocks of drafts, each in one graph.

Layer 0 of the decoder runs for the tokens of the text, in steps or chunks of a prompt; the other layers run
for a block, whose tokens all attend to each other. The host reads the candidates of all its rows once.
"""

from collections.abc import Sequence
from functools import partial

import torch

from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.blocks import device_module
from edgeinfer_kernels.cuda.cache.layout import TEXT, Layout
from edgeinfer_kernels.cuda.current_device import on_open_device
from edgeinfer_kernels.cuda.decode.captured_steps import CapturedSteps
from edgeinfer_kernels.cuda.decode.device_logits import DeviceRows
from edgeinfer_kernels.cuda.device_parts import DeviceOptions, SamplingSpace, synchronize
from edgeinfer_kernels.cuda.draft.candidate_steps import CandidateSteps
from edgeinfer_kernels.cuda.draft.captured_launches import CapturedLaunches
from edgeinfer_kernels.cuda.tuning.step_compiling import OnCompiled
from edgeinfer_kernels.cuda.tuning.step_shapes import Tuning
from edgeinfer_kernels.cuda.weights.device_model import OnLoaded
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_kernels.sizes.cuda_buffers import COMMON_STEP_SIZES


class BlockSteps:
    """The steps of a block drafter; without CUDA their kernels are launched one by one."""

    def __init__(self, steps: CapturedSteps, sampling: SamplingSpace) -> None:
        self._steps, self._device = steps, steps.step.workspace.state.device
        self._captured = CapturedLaunches(self._device)
        blocks = steps.step.model.blocks
        self._first = next(number for number, block in enumerate(blocks) if block.index.layer)
        """The number of the first block of layer 1."""
        self._whole = blocks[self._first].residual.block.whole_step
        self._candidates = CandidateSteps(steps.step.launches, sampling)

    def append_keys(self, tokens: int, start: int) -> None:
        """Write the keys and values of this many of the target's states, for positions start…"""
        self._steps.set_state([0] * tokens, start)
        width = self._steps.width(tokens)
        self._captured.run(("keys", width), partial(self.launch_keys, width))
        synchronize(self._device)

    def candidates(
        self, ids: Sequence[int], start: int, count: int, power: float
    ) -> list[list[tuple[int, float]]]:
        """For each row of a block at positions start… the `count` most probable tokens, falling, with the
        softmax of `power` times the logits.
        """
        self._steps.power = power
        self._steps.set_state(ids, start, whole=self._whole)
        width = self._steps.width(len(ids))
        self._captured.run(("block", width), partial(self.launch_block, width))
        synchronize(self._device)
        return self._candidates.found(len(ids), count)

    def launch_keys(self, tokens: int) -> None:
        """Launch the kernels of layer 0."""
        step = self._steps.step
        source = step.target(-1)
        for number, block in enumerate(step.model.blocks[: self._first]):
            module = device_module(block.residual.block.kind)
            source = module.decode(step, number, block, source, tokens, 0)

    def launch_block(self, tokens: int) -> None:
        """Launch the kernels of the other layers, of the output, and of the candidates of each row."""
        step = self._steps.step
        source = step.embed(tokens, self._first - 1)
        for number, block in list(enumerate(step.model.blocks))[self._first :]:
            module = device_module(block.residual.block.kind)
            source = module.decode(step, number, block, source, tokens, 0)
        step.launches.head(source, tokens)
        self._candidates.launch(tokens)

    def warm_up(self, widths: tuple[int, ...]) -> None:
        """Compile the kernels, and capture the steps of these numbers of tokens, as all later ones have."""
        self._steps.use_widths(widths)
        self._steps.set_state([0], 0)
        for width in widths:
            self._captured.prepare(("keys", width), partial(self.launch_keys, width))
            self._captured.prepare(("block", width), partial(self.launch_block, width))
        synchronize(self._device)


class BlockBackend(CudaBackend):
    """A block drafter on the GPU of its target, whose layers aren't run together."""

    def __init__(
        self,
        specification: DecoderSpec,
        weights: DecoderWeights,
        context: int,
        device: torch.device,
        options: DeviceOptions | None = None,
        *,
        tuning: Tuning | None = None,
        on_loaded: OnLoaded | None = None,
    ) -> None:
        super().__init__(specification, weights, context, device, options, tuning=tuning, on_loaded=on_loaded)
        self._parts.prefill.keep_layers((0,))
        self._blocks = BlockSteps(self.steps, self._parts.sampling)

    @on_open_device
    def forward_layers(self, x: DeviceRows, start: int, layers: Sequence[int]) -> None:
        """As `Backend.forward_layers`, of layer 0, for as many states as `embed` was called with tokens."""
        if tuple(layers) != (0,):
            raise ValueError(f"saw the layers {tuple(layers)}, wanted layer 0: the others run in blocks")
        self._select()
        if x.in_step:
            self._blocks.append_keys(len(x), start)
            return
        self._send([0] * len(x))
        self._parts.prefill.read(len(x), start, self.steps.set_chunk(start, len(x)))
        synchronize(self.device)

    @on_open_device
    def candidates(
        self, ids: Sequence[int], start: int, count: int, power: float
    ) -> list[list[tuple[int, float]]]:
        """As `BlockSteps.candidates`."""
        self._select()
        return self._blocks.candidates(ids, start, count, power)

    @on_open_device
    def warm_up(
        self,
        widths: tuple[int, ...] = COMMON_STEP_SIZES,
        on_compiled: OnCompiled | None = None,
        layouts: Sequence[Layout] = (TEXT,),
    ) -> None:
        """As `CudaBackend.warm_up`: compile and capture the steps of these numbers of tokens."""
        self._blocks.warm_up(widths)

    def drop(self) -> None:
        """As `CudaBackend.drop`."""
        self.__dict__.pop("_blocks", None)
        super().drop()
