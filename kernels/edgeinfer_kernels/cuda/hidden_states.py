"""Hidden states and matrices of a device backend that others read: the host, and draft heads there."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from edgeinfer_kernels.cuda.cache.device_state import DeviceStateBackend
from edgeinfer_kernels.cuda.current_device import on_open_device
from edgeinfer_kernels.cuda.decode.device_logits import DeviceRows
from edgeinfer_kernels.cuda.device_parts import DeviceOptions, DeviceParts, synchronize
from edgeinfer_kernels.cuda.draft.target import HeadTarget
from edgeinfer_kernels.cuda.draft.verification.started_step import StartedVerification
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.decoder import BlockIndex, DecoderSpec, DecoderWeights
from edgeinfer_kernels.reference.backend import final_norm
from edgeinfer_kernels.sizes.cuda_buffers import KEPT_STATES


class HiddenStatesBackend(DeviceStateBackend):
    """The base of device backends that share hidden states and matrices, which are in the memory of their
    `_parts`.
    """

    spec: DecoderSpec
    _weights: DecoderWeights
    _options: DeviceOptions
    _parts: DeviceParts
    _verification: StartedVerification

    def keep_hidden(self, layers: Sequence[int]) -> None:
        """As `Backend.keep_hidden`: only `kept_states` are kept."""
        if layers:
            raise ValueError(
                f"hidden states after {layers[0]} layers: a GPU keeps them only for a draft head"
            )

    def kept_hidden(self, tokens: int) -> list[DeviceRows]:
        return []

    def kept_rows(self, first: int, count: int) -> DeviceRows:
        """As `Backend.kept_rows`."""
        return DeviceRows(first, count, False)

    @property
    def table(self) -> DeviceMatrix | None:
        """The embedding on the device; None: a split model has it on the CPU, unless it is the head."""
        is_here = not self._options.stages or self._weights.token_embd is self._weights.output
        return self._parts.model.embedding if is_here else None

    @property
    def output(self) -> DeviceMatrix | None:
        """The output on the device, if all of its rows are here; a rank of tensor parallel has it only if it
        is the embedding.
        """
        model, part = self._parts.model, self._options.part
        if part is None:
            return model.head
        return model.embedding if part.is_tied else None

    def as_target(
        self,
        embedding: DeviceMatrix | None,
        output: DeviceMatrix | None,
        caches: Mapping[BlockIndex, BlockIndex] | None = None,
    ) -> HeadTarget:
        """This model as the target of a draft head, which reads this `embedding` and this `output`, None: its
        own. `caches`: the blocks of the head that read a cache, and whose.
        """
        kept, model = self._parts.workspace.kept, self._parts.model
        assert kept is not None, "a target keeps hidden states"
        verification = self._verification if self._verification.can_start else None
        return HeadTarget(embedding, output, kept.rows, verification, model.caches_of(caches or {}))

    def set_hidden(self, states: DeviceRows, start: int) -> None:
        """As `Backend.set_hidden`; `states.first` is the position of the first of them in the target's text,
        and the head reads those that the target keeps.
        """
        self._sequence.states_at = (states.first - start) % KEPT_STATES

    @on_open_device
    def copy_hidden(self, x: DeviceRows, target: torch.Tensor) -> None:
        """Copy hidden states (tokens, hidden_size) to the first rows of `target`, in main memory."""
        rows = self._hidden(x)
        target[: len(rows), : rows.shape[1]].copy_(rows, non_blocking=True)
        synchronize(self.device)

    def _hidden(self, x: DeviceRows) -> torch.Tensor:
        held = self._parts.workspace.x if x.in_step else self._parts.prefill.x
        return held[x.first : x.first + x.count, : self.spec.hidden_size]

    @on_open_device
    def final_norm(self, x: DeviceRows) -> npt.NDArray[np.float32]:
        rows = self._hidden(x).cpu().numpy()
        return final_norm(self.spec, self._weights, rows).astype(np.float32)
