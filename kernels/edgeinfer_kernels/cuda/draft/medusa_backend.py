"""Medusa heads on a GPU: the candidates of all heads for one hidden state of the target, in one graph."""

from functools import partial

import numpy as np
import torch

from edgeinfer_kernels.cuda.blocks import device_module
from edgeinfer_kernels.cuda.current_device import capturing, current, on_device
from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
from edgeinfer_kernels.cuda.decode.device_logits import DeviceRows
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.decode.step_norms import Source
from edgeinfer_kernels.cuda.decode.workspace import Workspace
from edgeinfer_kernels.cuda.device_memory import Arena, Uploader
from edgeinfer_kernels.cuda.device_parts import SamplingSpace, synchronize
from edgeinfer_kernels.cuda.draft.candidate_steps import CandidateSteps
from edgeinfer_kernels.cuda.draft.states.state_steps import read_states
from edgeinfer_kernels.cuda.draft.target import HeadTarget
from edgeinfer_kernels.cuda.tuning.step_shapes import Tuning
from edgeinfer_kernels.cuda.weights.device_model import DeviceModel
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_kernels.sizes.cuda_buffers import POWER_AT, SEQUENCES_AT, STATE_WORDS, STATES_AT

KIND = "embedding.medusa_head"


class MedusaParts:
    """All device allocations, in order; either counted or made."""

    def __init__(
        self,
        specification: DecoderSpec,
        weights: DecoderWeights,
        context: int,
        arena: Arena,
        target: HeadTarget,
    ) -> None:
        self.model = DeviceModel(specification, weights, arena, context, target=target)
        self.workspace = Workspace(self.model, arena)
        self.sampling = SamplingSpace(self.model.vocabulary, arena)


class MedusaSteps:
    """The launches of the first heads."""

    def __init__(self, parts: MedusaParts, tuning: Tuning, *, dependent: bool) -> None:
        parts.workspace.nothing = parts.model.blocks[0].weights.linear.words
        launches = StepLaunches(parts.model, parts.workspace, tuning, dependent=dependent)
        self.step = DecodeStep(launches)
        self.candidates = CandidateSteps(launches, parts.sampling)

    def launch(self, heads: int) -> None:
        """Launch the kernels of the first heads, and of their candidates."""
        step, space = self.step, self.step.space(KIND)
        read_states(step, None, step.model.spec.norm, space.states, 1)
        source = Source(space.states, step.workspace.sum_squares[0])
        for number in range(heads):
            device_module(KIND).decode(step, number, step.model.blocks[number], source, 1, 0)
        self.candidates.launch(heads)


class MedusaBackend:
    """The heads of a target on the same GPU, each a layer of the decoder. All memory is allocated in the
    constructor.

    Raises:
        UnsupportedOnDeviceError: a matrix without a kernel.
        DeviceMemoryError: the device has less memory than is counted.
    """

    def __init__(
        self,
        specification: DecoderSpec,
        weights: DecoderWeights,
        context: int,
        device: torch.device,
        target: HeadTarget,
        tuning: Tuning,
        *,
        dependent: bool = False,
    ) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        with current(device):
            counting = Arena()
            MedusaParts(specification, weights, context, counting, target)
            self._arena = Arena(device, counting.used)
            parts = MedusaParts(specification, weights, context, self._arena, target)
            uploader = Uploader(device)
            try:
                parts.model.fill(uploader)
            finally:
                uploader.close()
        self._steps = MedusaSteps(parts, tuning, dependent=dependent)
        self._words = torch.zeros(STATE_WORDS, dtype=torch.int32, pin_memory=self._cuda)
        self._words[SEQUENCES_AT + 4] = 1  # A step of one token, at position 0.

    @property
    def nbytes(self) -> int:
        """Bytes allocated on the device."""
        return self._arena.used

    @property
    def heads(self) -> int:
        """The number of heads."""
        return len(self._steps.step.model.blocks)

    def candidates(
        self, states: DeviceRows, heads: int, count: int, power: float
    ) -> list[list[tuple[int, float]]]:
        """For each of the first heads the `count` most probable tokens, falling, with the softmax of `power`
        times the logits, for the target's state at position `states.first` of its text.
        """
        with on_device(self.device):
            self._set_words(states.first, power)
            if self._cuda:
                self._captured(heads).replay()
            else:
                self._steps.launch(heads)
            synchronize(self.device)
            return self._steps.candidates.found(heads, count)

    def _set_words(self, position: int, power: float) -> None:
        words = self._words.numpy()
        words[STATES_AT] = position % len(self._steps.step.model.states_of_target)
        words[POWER_AT] = np.float32(power).view(np.int32)
        self._steps.step.workspace.state.copy_(self._words, non_blocking=True)

    def warm_up(self) -> None:
        """Compile the kernels, and capture the drafts of all lengths."""
        with on_device(self.device):
            self._set_words(0, 1.0)
            for heads in range(1, self.heads + 1):
                if self._cuda:
                    self._captured(heads)
                else:
                    self._steps.launch(heads)

    def _captured(self, heads: int) -> torch.cuda.CUDAGraph:
        if heads not in self._graphs:
            launch = partial(self._steps.launch, heads)
            launch()
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with capturing(self.device, graph):
                launch()
            self._graphs[heads] = graph
        return self._graphs[heads]

    def close(self) -> None:
        """Free the device memory."""
        with current(self.device):
            self._graphs.clear()
            self.__dict__.pop("_steps", None)
            self._arena.close()
