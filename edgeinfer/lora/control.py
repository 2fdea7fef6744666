"""What a model needs of its LoRA adapters."""

from collections.abc import Sequence
from typing import Protocol

from edgeinfer.options.lora_option import LoraChoice
from edgeinfer.snapshots.store import SnapshotStore


class LoraControl(Protocol):
    """The adapters of a loaded model."""

    @property
    def choices(self) -> tuple[LoraChoice, ...]:
        """The adapters in use, with their scales."""
        ...

    def set(self, choices: Sequence[LoraChoice]) -> None:
        """Use these adapters, and no others. Raises `SettingError`; then the ones before stay."""
        ...

    def snapshot_store(self) -> SnapshotStore:
        """The store of prompt caches made with the adapters in use."""
        ...
