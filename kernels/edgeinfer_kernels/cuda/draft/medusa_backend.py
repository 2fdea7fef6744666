"""Medusa heads on a GPU: the candidates of all heads for one hidden state of the target, in one graph."""

from functools import partial

import numpy as np
import torch

from edgeinfer_kernels.cuda.blocks import device_module
from edgeinfer_kernels.cuda.current_device import on_device
from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
from edgeinfer_kernels.cuda.decode.device_logits import DeviceRows
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.decode.step_norms import Source
from edgeinfer_kernels.cuda.device_parts import synchronize
from edgeinfer_kernels.cuda.draft.candidate_steps import CandidateSteps
from edgeinfer_kernels.cuda.draft.captured_launches import CapturedLaunches
from edgeinfer_kernels.cuda.draft.promptless_head import HeadParts, PromptlessHead
from edgeinfer_kernels.cuda.draft.states.state_steps import read_states
from edgeinfer_kernels.cuda.draft.target import HeadTarget
from edgeinfer_kernels.cuda.tuning.step_shapes import Tuning
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_kernels.sizes.cuda_buffers import POWER_AT, SEQUENCES_AT, STATE_WORDS, STATES_AT

KIND = "embedding.medusa_head"


class MedusaSteps:
    """The launches of the first heads."""

    def __init__(self, parts: HeadParts, tuning: Tuning, *, dependent: bool) -> None:
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


class MedusaBackend(PromptlessHead):
    """The heads of a target on the same GPU, each a layer of the decoder."""

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
        parts = self._load(specification, weights, context, device, target)
        self._captured = CapturedLaunches(device)
        self._steps = MedusaSteps(parts, tuning, dependent=dependent)
        self._words = torch.zeros(STATE_WORDS, dtype=torch.int32, pin_memory=self._cuda)
        self._words[SEQUENCES_AT + 4] = 1  # A step of one token, at position 0.

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
            self._captured.run(heads, partial(self._steps.launch, heads))
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
                self._captured.prepare(heads, partial(self._steps.launch, heads))

    def _drop(self) -> None:
        self._captured.forget()
        self.__dict__.pop("_steps", None)
