"""Several draft heads on the GPU of their target, each with a cache: each drafts one token."""

from collections.abc import Sequence
from dataclasses import replace

from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.cache.layout import TEXT, Layout
from edgeinfer_kernels.cuda.current_device import on_open_device
from edgeinfer_kernels.cuda.decode.device_logits import DeviceRows
from edgeinfer_kernels.cuda.tuning.step_compiling import OnCompiled
from edgeinfer_kernels.sizes.cuda_buffers import COMMON_STEP_SIZES


class FirstHead(CudaBackend):
    """The first of several heads. All of them process what it processes of a text, and take part in its
    drafts, which are chains.
    """

    _further: tuple[CudaBackend, ...] = ()

    def lead(self, others: Sequence[CudaBackend]) -> None:
        """Set the further heads, which are closed with this one."""
        self._further = tuple(others)
        drafts = [other.drafts for other in others if other.drafts is not None]
        assert self.drafts is not None
        assert len(drafts) == len(others), "only draft heads draft"
        self.drafts.lead(drafts)
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
        """As `CudaBackend.warm_up`; drafts are those of all heads."""
        for other in self._further:
            other.steps.warm_up(widths, on_compiled, layouts)
        super().warm_up(widths, on_compiled, layouts)

    def close(self) -> None:
        for other in self._further:
            other.close()
        super().close()
