"""Sampling on the device, one step ahead of the host."""

from collections.abc import Sequence

import torch
from torch import Tensor

from edgeinfer_kernels.cuda.cache.sequences import DeviceSequence
from edgeinfer_kernels.cuda.decode.captured_steps import BEST, RING, SAMPLE, CapturedSteps
from edgeinfer_kernels.cuda.device_parts import SamplingSpace
from edgeinfer_kernels.sizes.cuda_buffers import RECENT, REQUEST_SIZE


class DeviceSampling:
    """Steps of one token with sampling; the sampled token is written to host-readable memory."""

    def __init__(self, steps: CapturedSteps, sampling: SamplingSpace, *, cuda: bool) -> None:
        self._steps = steps
        self._sampling_space = sampling
        self._requests = _host((RING, REQUEST_SIZE), torch.float64, cuda)
        self._recent = _host((RECENT,), torch.int32, cuda)
        self._events = [torch.cuda.Event() for _ in range(2)] if cuda else []
        self._ahead: tuple[DeviceSequence, int, int, bool] | None = None

    def discard_ahead(self) -> None:
        """Discard the step that was started ahead, because it is not the requested one."""
        self._ahead = None

    def sample_next(
        self,
        token_id: int,
        start: int,
        request: Sequence[float] | None,
        recent: Sequence[int],
        next_request: Sequence[float] | None,
        may_run_ahead: bool,
    ) -> int:
        """As `CudaBackend.sample_next`."""
        is_random = request is not None
        sequence = self._steps.sequence
        if self._ahead != (sequence, token_id, start, is_random):
            self._steps.set_state([token_id], start)
            self._step(start, request, recent)
        rows = self._steps.per_layer
        may_run_ahead = may_run_ahead and rows.may_follow
        runs_ahead = may_run_ahead and not recent and (next_request is not None or not is_random)
        if runs_ahead:
            self._steps.set_next(start + 1)
            rows.expect()
            self._step(start + 1, next_request, ())
        sampled = 0
        try:
            sampled = self._sampled_at(start)
        finally:  # The started step waits for its rows, even if it's interrupted.
            if runs_ahead:
                rows.give([max(sampled, 0)])
        if rows.were_late():
            self._ahead = None
            return self.sample_entered(token_id, start, request, recent)
        self._ahead = (sequence, sampled, start + 1, is_random) if runs_ahead and sampled >= 0 else None
        return sampled

    def sample_entered(
        self, token_id: int, start: int, request: Sequence[float] | None, recent: Sequence[int]
    ) -> int:
        """As `CudaBackend.sample_entered`."""
        self._steps.set_state([token_id], start)
        self._step(start, request, recent)
        return self._sampled_at(start)

    def _step(self, start: int, parameters: Sequence[float] | None, recent: Sequence[int]) -> None:
        if parameters is None:
            self._steps.run(1, BEST)
        else:
            request = self._requests[start % RING]
            request[:] = torch.tensor(parameters, dtype=torch.float64)
            self._sampling_space.requests[0].copy_(request, non_blocking=True)
            if recent:
                self._recent[: len(recent)] = torch.tensor(recent, dtype=torch.int32)
                self._sampling_space.recent[0].copy_(self._recent, non_blocking=True)
            self._steps.run(1, SAMPLE)
        self._steps.per_layer.report()
        if self._events:
            self._events[start % 2].record()

    def _sampled_at(self, start: int) -> int:
        """The id sampled after the token at `start`; waits until the device has written it."""
        if self._events:
            self._events[start % 2].synchronize()
        return int(self._steps.sampled[start % RING])


def _host(shape: tuple[int, ...], dtype: torch.dtype, cuda: bool) -> Tensor:
    return torch.zeros(shape, dtype=dtype, pin_memory=cuda)
