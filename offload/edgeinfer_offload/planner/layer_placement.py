"""The placement of each layer, and the stages of a step that follow from it."""

from collections.abc import Sequence
from dataclasses import dataclass

from edgeinfer_kernels.stages import Device, Exchange, Shard, Stage

DeviceName = str
""""cpu", "gpu" (the first), "gpu1", …; or "disk", the memory-mapped file, whose pages the system loads."""


@dataclass(frozen=True)
class LayerPlacement:
    """The placement of one layer's parts, as input of a loader.

    Dense: the first `hot_neurons` of `neurons` (in file order) are on the GPU. MoE: the experts in
    `gpu_experts`, of `experts` in total; router and shared expert are on the attention's device. `rest`:
    where the other neurons or experts are; all experts with an `expert_cache`. `is_joined`: the sum of the
    neurons is added on the attention's device, also if that has none, because other blocks follow there.
    """

    attention: DeviceName
    kv_cache: DeviceName
    hot_neurons: int = 0
    neurons: int = 0
    gpu_experts: tuple[int, ...] = ()
    experts: int = 0
    rest: DeviceName = "cpu"
    expert_cache: bool = False
    is_joined: bool = False
    gathers: bool = False
    """Whether the GPU reads only the active ones of its neurons."""
    granules_gpu: DeviceName = "gpu"
    """The GPU of the neurons or experts that are on one."""

    @property
    def granules(self) -> int:
        """Number of neurons, or of experts."""
        return self.neurons or self.experts

    @property
    def granules_on_gpu(self) -> int:
        return self.hot_neurons if self.neurons else len(self.gpu_experts)

    @property
    def has_some_experts(self) -> bool:
        """Whether some, but not all, of its experts are on the GPU."""
        return 0 < len(self.gpu_experts) < self.experts

    @property
    def whole_on(self) -> DeviceName | None:
        """The device that holds the whole layer; None: the layer is split."""
        own = self.granules_on_gpu
        devices = {
            self.attention,
            self.kv_cache,
            *([self.granules_gpu] if own else []),
            *([self.rest] if own < self.granules else []),
        }
        return self.attention if len(devices) == 1 else None

    def shard(self, index: int, *, on_gpu: bool, undivided: bool) -> Shard:
        """The part of layer `index` on the GPU, or the rest."""
        neurons, experts = range(self.hot_neurons), self.gpu_experts
        if not on_gpu:
            there = set(experts)
            neurons = range(self.hot_neurons, self.neurons)
            experts = tuple(number for number in range(self.experts) if number not in there)
        return Shard(index, undivided, neurons, experts, self.expert_cache and not on_gpu)


def plan_stages(layers: Sequence[LayerPlacement], head: str, embedding: str) -> tuple[Stage, ...]:
    """The stages of a step. `head`, `embedding`: the names of their devices."""
    stages = _Stages(Device.of(embedding))
    for index, layer in enumerate(layers):
        attention, rest = Device.of(layer.attention), Device.of(layer.rest)
        is_split = 0 < layer.granules_on_gpu < layer.granules
        stages.go_to(attention)
        if attention == rest or layer.granules_on_gpu == layer.granules:
            stages.add(layer.shard(index, on_gpu=attention != rest, undivided=True))
            continue
        stages.add(Shard(index, undivided=True))
        others = layer.shard(index, on_gpu=False, undivided=False)
        if not is_split and not layer.experts and not layer.is_joined:
            stages.go_to(rest)
            stages.add(others)
            continue
        stages.end("hidden_states")
        if is_split:
            stages.add(layer.shard(index, on_gpu=True, undivided=False))
            stages.end("partial_sums")
        stages.device = rest
        stages.add(others)
        stages.end("partial_sums")
        stages.device = attention
    stages.go_to(Device.of(head))
    stages.end("")
    return tuple(stages.done)


class _Stages:
    """The finished stages, and the open one on `device`."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.done: list[Stage] = []
        self._shards: list[Shard] = []

    def add(self, shard: Shard) -> None:
        self._shards.append(shard)

    def go_to(self, device: Device) -> None:
        """Move the hidden states to a device, unless they are there."""
        if device != self.device:
            self.end("hidden_states")
        self.device = device

    def end(self, exchange: Exchange) -> None:
        self.done.append(Stage(self.device, tuple(self._shards), exchange))
        self._shards = []
