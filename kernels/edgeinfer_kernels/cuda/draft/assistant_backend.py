"""A Gemma 4 assistant on the GPU of its target, whose KV caches it reads: a whole draft without the host."""

import torch

from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.current_device import on_device
from edgeinfer_kernels.cuda.decode.captured_steps import CapturedSteps
from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
from edgeinfer_kernels.cuda.decode.device_logits import DeviceRows
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.draft.draft_steps import DraftSteps
from edgeinfer_kernels.cuda.draft.promptless_head import PromptlessHead
from edgeinfer_kernels.cuda.draft.target import HeadTarget
from edgeinfer_kernels.cuda.tuning.step_shapes import Tuning
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_kernels.draft_loop import DraftedTokens, DraftRequest


class AssistantBackend(PromptlessHead):
    """The assistant of a target. Its steps have one token, at the position of the last cached one of the
    target, and write no cache. `kv`: the type of the target's caches.
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
        kv: CacheType = "f16",
        dependent: bool = False,
    ) -> None:
        parts = self._load(specification, weights, context, device, target, kv)
        launches = StepLaunches(parts.model, parts.workspace, tuning, dependent=dependent)
        self._steps = CapturedSteps(DecodeStep(launches), parts.sampling)
        self._drafts = DraftSteps(self._steps, parts.sampling)

    def draft(self, token: int, states: DeviceRows, request: DraftRequest) -> DraftedTokens:
        """The most probable tokens after one, as `Backend.draft`. `states.first` is the position of the
        token before it, and of its state.
        """
        with on_device(self.device):
            return self._drafts.draft([token], states.first, request)

    def warm_up(self) -> None:
        with on_device(self.device):
            self._drafts.warm_up((1,))

    def _drop(self) -> None:
        self.__dict__.pop("_drafts", None)
        self.__dict__.pop("_steps", None)
