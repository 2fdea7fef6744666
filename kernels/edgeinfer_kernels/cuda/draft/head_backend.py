"""Draft heads on the GPU of their target as backends: one head, or the first of several."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.cache.layout import TEXT, Layout
from edgeinfer_kernels.cuda.current_device import on_open_device
from edgeinfer_kernels.cuda.decode.device_logits import DeviceRows
from edgeinfer_kernels.cuda.device_parts import synchronize
from edgeinfer_kernels.cuda.draft.draft_steps import DraftSteps
from edgeinfer_kernels.cuda.tuning.step_compiling import OnCompiled
from edgeinfer_kernels.cuda.tuning.step_shapes import Tuning
from edgeinfer_kernels.cuda.weights.device_model import OnLoaded
from edgeinfer_kernels.draft_loop import DraftedTokens, DraftRequest
from edgeinfer_kernels.sizes.cuda_buffers import COMMON_STEP_SIZES, MAX_TOKENS


class HeadBackend(CudaBackend):
    """A draft head; `target` of the options is what it reads of its target."""

    def _load(self, context: int, tuning: Tuning | None, on_loaded: OnLoaded | None) -> None:
        super()._load(context, tuning, on_loaded)
        target = self._options.target
        verification = None if target is None else target.verification
        self.drafts = DraftSteps(self.steps, self._parts.sampling, verification)
        self.capabilities = replace(self.capabilities, max_draft_prompt=MAX_TOKENS)

    def _read(
        self,
        ids: Sequence[int],
        x: DeviceRows,
        start: int,
        before: Sequence[int] = (),
        pages: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """As `CudaBackend._read`; the next step may follow before the host reads any logits."""
        self.drafts.discard_ahead()
        super()._read(ids, x, start, before, pages)
        synchronize(self.device)

    @on_open_device
    def draft(self, ids: Sequence[int], start: int, request: DraftRequest) -> DraftedTokens:
        """As `Backend.draft`; the most probable tokens."""
        self._select()
        return self.drafts.draft(ids, start, request)

    @on_open_device
    def draft_level(
        self, ids: Sequence[int], start: int, parents: Sequence[int], count: int, power: float
    ) -> list[list[tuple[int, float]]]:
        """As `Backend.draft_level`."""
        self._select()
        return self.drafts.level(ids, start, parents, count, power)

    @on_open_device
    def warm_up(
        self,
        widths: tuple[int, ...] = COMMON_STEP_SIZES,
        on_compiled: OnCompiled | None = None,
        layouts: Sequence[Layout] = (TEXT,),
    ) -> None:
        """As `CudaBackend.warm_up`, with drafts after steps of these token counts."""
        self.steps.warm_up(widths, on_compiled, layouts)
        self.drafts.warm_up(widths[:-1], padded=widths[-1])

    @on_open_device
    def warm_up_drafts(self, *, trees: bool) -> None:
        """Capture all drafts that a completion may have after `warm_up`, with `trees` too."""
        *widths, padded = self.steps.widths
        self.drafts.warm_up(widths, padded)
        if trees:
            self.drafts.warm_up_trees(widths, padded)

    def discard_ahead(self) -> None:
        """As `CudaBackend.discard_ahead`, drafts too."""
        self.drafts.discard_ahead()
        super().discard_ahead()

    def drop(self) -> None:
        """As `CudaBackend.drop`."""
        self.__dict__.pop("drafts", None)
        super().drop()


class FirstHead(HeadBackend):
    """The first of several heads. All of them process what it processes of a text, and take part in its
    drafts, which are chains.
    """

    _further: tuple[HeadBackend, ...] = ()

    def lead(self, others: Sequence[HeadBackend]) -> None:
        """Set the further heads, which are closed with this one."""
        self._further = tuple(others)
        self.drafts.lead([other.drafts for other in others])
        self.capabilities = replace(self.capabilities, max_tree_tokens=0)

    @property
    def nbytes(self) -> int:
        """Bytes allocated on the device by all heads."""
        return super().nbytes + sum(other.nbytes for other in self._further)

    def set_hidden(self, states: DeviceRows, start: int) -> None:
        for other in self._further:
            other.set_hidden(states, start)
        super().set_hidden(states, start)

    def embed(self, ids: Sequence[int]) -> DeviceRows:
        for other in self._further:
            other.embed(ids)
        return super().embed(ids)

    def forward(self, x: DeviceRows, start: int) -> None:
        for other in self._further:
            other.forward(x, start)
        super().forward(x, start)

    @on_open_device
    def warm_up(
        self,
        widths: tuple[int, ...] = COMMON_STEP_SIZES,
        on_compiled: OnCompiled | None = None,
        layouts: Sequence[Layout] = (TEXT,),
    ) -> None:
        """As `HeadBackend.warm_up`; drafts are those of all heads."""
        for other in self._further:
            other.steps.warm_up(widths, on_compiled, layouts)
        super().warm_up(widths, on_compiled, layouts)

    def close(self) -> None:
        for other in self._further:
            other.close()
        super().close()
