"""The LoRA adapters of a loaded model, which can be changed while it is loaded."""

from collections.abc import Sequence

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.engine.ring_positions import RingPositions
from edgeinfer.errors import SettingError
from edgeinfer.loading.model_source import ModelSource
from edgeinfer.lora.adapter import Adapter, AdapterError
from edgeinfer.lora.binding import Scaled, bound_lora
from edgeinfer.lora.reading import read_adapters
from edgeinfer.options.lora_option import LoraChoice
from edgeinfer.snapshots.store import SnapshotStore, file_fingerprint, snapshots_folder
from edgeinfer_kernels.lora.weights import LoraError


class ModelLora:
    """Reads adapters of one model and lets its engine use them."""

    def __init__(self, source: ModelSource, engine: NativeEngine) -> None:
        self._source, self._engine = source, engine
        self._scaled: tuple[Scaled, ...] = ()

    @property
    def choices(self) -> tuple[LoraChoice, ...]:
        """The adapters in use, with their scales."""
        return tuple(LoraChoice(adapter.path, scale) for adapter, scale in self._scaled)

    @property
    def fingerprint(self) -> tuple[tuple[str, float], ...]:
        """Equal for adapters that change keys and values equally."""
        return tuple((adapter.digest, scale) for adapter, scale in self._scaled if scale)

    def snapshot_store(self) -> SnapshotStore:
        """The store of prompt caches of this file, with these settings and the adapters in use."""
        source = self._source
        options, rings = source.options, RingPositions(source.specification, source.context).shapes
        lora = (self.fingerprint,) if self.fingerprint else ()
        fingerprint = file_fingerprint(source.file.path, options.kv, options.sparse, *rings, *lora)
        return SnapshotStore(snapshots_folder(), fingerprint)

    def set(self, choices: Sequence[LoraChoice]) -> None:
        """Use these adapters, and no others; the engine's caches are emptied. On an error nothing changes.

        Raises:
            AdapterError: one that can't be read or doesn't fit the model.
            SettingError: the engine takes none.
        """
        known: list[Adapter] = [adapter for adapter, _ in self._scaled]
        self.use(read_adapters(choices, self._source.config, known))

    def use(self, scaled: Sequence[Scaled]) -> None:
        """As `set`, with adapters that are read."""
        if not scaled and not self._scaled:
            return
        if not self._engine.capabilities.takes_lora:
            raise SettingError(
                f"lora: {self._source.name} is on several GPUs by layers, which takes no adapters; load it "
                "with split='tensor', or device='cuda:0' or 'cpu'"
            )
        bound = bound_lora(self._source.file, self._source.weights, scaled)
        try:
            self._engine.set_lora(bound)
        except LoraError as error:
            raise AdapterError(f"lora: {error}; leave the adapter out") from error
        self._scaled = tuple(scaled)
