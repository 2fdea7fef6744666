"""The tokens after those of a step, found on the device: the most probable ones, or sampled ones."""

from collections.abc import Sequence

import torch
from torch import Tensor

from edgeinfer_kernels.cuda.decode.captured_steps import CapturedSteps
from edgeinfer_kernels.cuda.decode.sampling import argmax, sample
from edgeinfer_kernels.cuda.device_parts import SamplingSpace
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS, RECENT, REQUEST_SIZE


class FoundTokens:
    """Finds them from the logits of the last step of `steps`; the host reads those that were found last."""

    def __init__(self, steps: CapturedSteps, space: SamplingSpace) -> None:
        self._steps, self._space = steps, space
        cuda = steps.step.workspace.state.is_cuda
        self._requests = torch.zeros((MAX_TOKENS, REQUEST_SIZE), dtype=torch.float64, pin_memory=cuda)
        self._recent = torch.zeros((MAX_TOKENS, RECENT), dtype=torch.int32, pin_memory=cuda)
        self._results = torch.zeros((MAX_TOKENS, 2), dtype=torch.int32, pin_memory=cuda)
        self._ids = self._results.numpy()[:, 0]
        self._event = torch.cuda.Event() if cuda else None

    @property
    def on_device(self) -> Tensor:
        """(tokens, 2) int32: the token after each of the step's, -1 if it can't be found."""
        return self._space.results

    def launch_best(self, tokens: int) -> None:
        """Find the most probable token after each of the first tokens."""
        self._steps.find_best(tokens)
        self._send_results(tokens)

    def launch_sampled(self, requests: Sequence[Sequence[float]], recent: Sequence[Sequence[int]]) -> None:
        """Sample the tokens of these requests; `recent`: the ids that get penalties."""
        space, count = self._space, len(requests)
        logits = self._steps.step.workspace.logits[:count]
        if all(request[0] == 0 for request in requests) and not any(recent):
            argmax(logits, space.buffers, space.sampled, space.results)
        else:
            self._send_requests(requests, recent)
            sample(logits, space.requests, space.recent, space.buffers, space.sampled, space.results)
        self._send_results(count)

    def _send_requests(self, requests: Sequence[Sequence[float]], recent: Sequence[Sequence[int]]) -> None:
        space, count = self._space, len(requests)
        self._requests.numpy()[:count] = requests
        space.requests[:count].copy_(self._requests[:count], non_blocking=True)
        if not any(recent):
            return
        rows = self._recent.numpy()
        for row, ids in enumerate(recent):
            rows[row, : len(ids)] = ids
        # From pinned memory: another copy would wait for the step that is running.
        space.recent[:count].copy_(self._recent[:count], non_blocking=True)

    def _send_results(self, tokens: int) -> None:
        self._results[:tokens].copy_(self._space.results[:tokens], non_blocking=True)
        self._steps.per_layer.report()
        if self._event is not None:
            self._event.record()

    def read(self, tokens: int) -> list[int]:
        """The first tokens that were found last; waits for them."""
        if self._event is not None:
            self._event.synchronize()
        found: list[int] = self._ids[:tokens].tolist()
        return found
