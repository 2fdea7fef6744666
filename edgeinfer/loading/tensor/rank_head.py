"""A draft head in the process of a rank of tensor parallel: it is whole, and reads what its rank has."""

from collections.abc import Sequence
from pathlib import Path

from edgeinfer.hugging_face.opening import open_file
from edgeinfer.loading.draft_head_file import HeadFile
from edgeinfer.loading.gpu_loading import gpu_heads, gpu_medusa
from edgeinfer.loading.model_source import ModelSource
from edgeinfer.model_config.layers.medusa_heads import is_medusa_file, read_medusa
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.decode.device_logits import DeviceRows
from edgeinfer_kernels.cuda.draft.medusa_backend import MedusaBackend
from edgeinfer_kernels.draft_loop import DraftedTokens, DraftRequest
from edgeinfer_kernels.sizes.cuda_buffers import ALL_STEP_SIZES
from edgeinfer_offload.runtime.tensor_head import Candidates, HeadReady


class RankHead:
    """The head in the file at `path`, None: in that of the model, next to a rank's `backend`.

    `offset`: from the positions of the head's text to those of the target's.
    """

    def __init__(self, path: Path | None, source: ModelSource, backend: CudaBackend, chunk: int) -> None:
        self._file = source.file if path is None else open_file(path)
        self._medusa: MedusaBackend | None = None
        self._heads: CudaBackend | None = None
        if is_medusa_file(self._file):
            medusa = read_medusa(self._file, source.config, source.weights)
            self._medusa = gpu_medusa(medusa, source, backend)
            self._medusa.warm_up()
            return
        file = HeadFile.of(self._file, source.file, source.config, required=True)
        self._heads = gpu_heads(file.heads(source), source, backend, chunk)
        self._heads.warm_up(ALL_STEP_SIZES)

    def ready(self) -> HeadReady:
        """What the model's process needs to know."""
        if self._medusa is not None:
            return HeadReady(self._medusa.nbytes, heads=self._medusa.heads)
        heads = self._drafting
        return HeadReady(heads.nbytes, heads.capabilities, heads.batch)

    @property
    def _drafting(self) -> CudaBackend:
        assert self._heads is not None, "Medusa heads have candidates only"
        return self._heads

    def _reading(self, start: int, offset: int) -> CudaBackend:
        """The heads, which read the states of the target from a position of the head's text on."""
        self._drafting.set_hidden(DeviceRows(start + offset, 0, False), start)
        return self._drafting

    def forward(self, ids: list[int], start: int, offset: int) -> None:
        """Process pairs at positions start… of the head's text."""
        heads = self._reading(start, offset)
        heads.forward(heads.embed(ids), start)

    def draft(self, ids: list[int], start: int, offset: int, request: DraftRequest) -> DraftedTokens:
        """As `Backend.draft`."""
        return self._reading(start, offset).draft(ids, start, request)

    def draft_level(
        self, ids: list[int], start: int, offset: int, parents: Sequence[int], count: int, power: float
    ) -> list[Candidates]:
        """As `Backend.draft_level`."""
        return self._reading(start, offset).draft_level(ids, start, parents, count, power)

    def candidates(self, position: int, heads: int, count: int, power: float) -> list[Candidates]:
        """As `MedusaBackend.candidates`, for the state at a position of the target's text."""
        assert self._medusa is not None, "only Medusa heads have candidates"
        return self._medusa.candidates(DeviceRows(position, 1, False), heads, count, power)

    def close(self) -> None:
        """Free the device memory."""
        for each in (self._heads, self._medusa):
            if each is not None:
                each.close()
