"""How fast a prompt is read: each part where it lies, or all on the GPU with the CPU's weights sent there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgeinfer_kernels.model_sizes import LayerSizes, MatrixSize
from edgeinfer_offload.layer_costs import LayerCosts
from edgeinfer_offload.model_placing import ModelPlacing
from edgeinfer_offload.placement_search import CPU, GPU, Choice, Placement
from edgeinfer_offload.roofline import Roof, Work

MOST_TOKENS = 1 << 16
"""Where the search for the crossover ends."""
SCORES_SHARE = 0.25
"""Of the speed of products with weights: what attention's products reach, whose softmax stands between."""
LAYER_SECONDS = 0.3e-3
"""What launching a layer of a chunk takes the host, for which the GPU waits if it has less to do itself."""
MIXTURE_SECONDS = 1.0e-3
"""The same of a mixture, whose choice of experts the host has to see before it goes on."""
UnpackedRate = Callable[[str], float]
"""Bytes per second at which weights of a format become float16 on the GPU."""


@dataclass(frozen=True)
class _Part:
    """Weights that lie together: bytes, operations for a token, and the share of the bytes that a token
    touches, 1 where that is all. `unpacking`: seconds in which the GPU makes float16 of all if they are sent.
    """

    nbytes: float
    operations: float
    touched: float = 1.0
    unpacking: float = 0.0

    def share(self, tokens: int) -> float:
        """Of the bytes, what any of so many tokens needs."""
        return 1 - (1 - self.touched) ** tokens

    def work(self, tokens: int) -> Work:
        """Reading each weight that any of the tokens needs once."""
        return Work(self.operations * tokens, max(self.nbytes * self.share(tokens), 1.0))


@dataclass(frozen=True)
class _Layer:
    """One layer: its parts on either side; what a cached position takes on the CPU, 0 if it isn't there."""

    sizes: LayerSizes
    attends_on_gpu: bool
    here: Sequence[_Part]
    there: Sequence[_Part]
    position_bytes: float

    def scores(self, tokens: int, start: int) -> Work:
        """Of attention, on the tokens of a chunk behind `start` others."""
        seen = min(start + tokens / 2, self.sizes.window or start + tokens)
        operations = 4 * tokens * seen * self.sizes.heads * self.sizes.head_dim
        return Work(operations / SCORES_SHARE, 1.0)


class PromptSpeed:
    """Seconds of a prompt under a placement. `send_from`: from how many tokens on weights of the CPU are sent
    to the GPU; None: nothing is there, or never.
    """

    def __init__(self, placing: ModelPlacing, chosen: Placement) -> None:
        machine = placing.machine
        processor, graphics, link = machine.processor, placing.pricing.graphics, machine.link
        self._cpu = Roof(processor.operations_per_second, processor.bytes_per_second)
        self._gpu: Roof | None = None
        if graphics and chosen.uses_gpu:
            self._gpu = Roof(graphics.operations_per_second, graphics.bytes_per_second)
        self._link = link.to_gpu if link else 0.0
        unpacked = graphics.unpacked_rate if graphics else None
        self._layers = [
            _layer(placing, layer, costs, choice, unpacked)
            for layer, costs, choice in zip(placing.sizes.layers, placing.costs, chosen.choices, strict=True)
        ]
        head = _Part(placing.sizes.head.nbytes, 2 * placing.sizes.head.weights)
        roof = self._gpu if chosen.ends.head == GPU else self._cpu
        self._head = head.work(1).seconds(roof or self._cpu)
        able = all(layer.attends_on_gpu or not layer.sizes.experts for layer in self._layers)
        self.send_from = self._crossover() if placing.sends and able else None

    def seconds(self, prompt: int, chunk: int, batch: int) -> float:
        """From the first token of a prompt to the logits behind the last, read in chunks."""
        step = chunk if any(layer.attends_on_gpu for layer in self._layers) else batch
        total, start = self._head, 0
        while start < prompt:
            tokens = min(step, prompt - start)
            sends = self.send_from is not None and tokens >= self.send_from
            total += self._sent(tokens, start) if sends else self._in_turns(tokens, start)
            start += tokens
        return total

    def _in_turns(self, tokens: int, start: int) -> float:
        """Seconds of a chunk, everything being computed where it lies."""
        total = 0.0
        for layer in self._layers:
            attending = self._gpu if layer.attends_on_gpu and self._gpu else self._cpu
            total += layer.scores(tokens, start).seconds(attending)
            total += sum(part.work(tokens).seconds(self._cpu) for part in layer.here)
            total += sum(part.work(tokens).seconds(self._gpu) for part in layer.there) if self._gpu else 0.0
        return total

    def _sent(self, tokens: int, start: int) -> float:
        """Seconds of a chunk, everything being computed on the GPU: copies go on meanwhile, but for those of
        experts, which begin when the layer's are chosen.
        """
        assert self._gpu is not None
        copying = computing = chosen = 0.0
        for layer in self._layers:
            copied = sum(part.nbytes * part.share(tokens) for part in layer.here) / self._link
            unpacked = sum(part.unpacking * part.share(tokens) for part in layer.here)
            parts = sum(part.work(tokens).seconds(self._gpu) for part in (*layer.here, *layer.there))
            scores = layer.scores(tokens, start).seconds(self._gpu)
            if layer.sizes.experts:
                chosen += max(copied, unpacked + parts) + scores + MIXTURE_SECONDS
                continue
            copying += copied + layer.position_bytes * (start + tokens) / self._link
            computing += max(unpacked + parts + scores, LAYER_SECONDS)
        return max(copying, computing) + chosen

    def _crossover(self) -> int | None:
        """The least tokens for which sending beats computing on the CPU."""
        if self._gpu is None or not any(layer.here for layer in self._layers):
            return None

        def pays(tokens: int) -> bool:
            return self._sent(tokens, 0) < self._in_turns(tokens, 0)

        if not pays(MOST_TOKENS):
            return None
        low, high = 1, MOST_TOKENS
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if pays(middle) else (middle + 1, high)
        return low


def _unpacking(matrices: Sequence[MatrixSize], rate: UnpackedRate | None) -> float:
    """Seconds a byte of these matrices takes to become float16 on the GPU."""
    nbytes = sum(matrix.nbytes for matrix in matrices)
    return sum(matrix.nbytes / rate(matrix.format) for matrix in matrices) / nbytes if rate else 0.0


def _layer(
    placing: ModelPlacing, layer: LayerSizes, costs: LayerCosts, choice: Choice, unpacked: UnpackedRate | None
) -> _Layer:
    """One layer's parts on the CPU and on the GPU."""
    sides: tuple[list[_Part], list[_Part]] = ([], [])
    always = layer.attention_matrices() + (layer.experts.always() if layer.experts else [])
    own = costs.attention[choice.attention]
    shared = costs.always[choice.attention] if costs.always else None
    nbytes = sum(cost.nbytes for cost in (own, shared) if cost)
    operations = 2 * sum(matrix.weights for matrix in always)
    sides[choice.attention].append(_Part(nbytes, operations, 1.0, nbytes * _unpacking(always, unpacked)))
    block = layer.divisible()
    weights = sum(matrix.weights for matrix in block.matrices())
    share = costs.unit_neurons[choice.units] / (layer.experts.count if layer.experts else block.neurons)
    used = layer.experts.used if layer.experts else 1
    touched = layer.experts.used / layer.experts.count if layer.experts else 1.0
    slowness = _unpacking(block.matrices(), unpacked)
    halves = (costs.cpu_bytes[choice.units], 1 - share), (costs.gpu_bytes[choice.units], share)
    for side, (half, part) in zip(sides, halves, strict=True):
        if half:
            side.append(_Part(float(half), 2 * weights * used * part, touched, float(half) * slowness))
    cached = placing.pricing.cache_bytes_on_cpu(layer, placing.wishes.context) / placing.wishes.context
    attends = choice.attention == GPU
    return _Layer(layer, attends, sides[CPU], sides[GPU], 0.0 if attends else cached)
