"""How fast a prompt is read: where the weights lie, or on the GPU after sending them over the link."""

from collections.abc import Sequence
from dataclasses import dataclass

from edgeinfer_kernels.model_sizes import LayerSizes
from edgeinfer_offload.layer_costs import LayerCosts
from edgeinfer_offload.model_placing import ModelPlacing
from edgeinfer_offload.placement_search import GPU, Choice, Placement
from edgeinfer_offload.roofline import Roof, Work

MOST_TOKENS = 1 << 16
"""Where the search for the crossover ends."""
SCORES_SHARE = 0.25
"""Of the speed of products with weights: what attention's products reach, whose softmax stands between."""


@dataclass(frozen=True)
class _Part:
    """Weights that lie together: bytes, operations for a token, and the share of the bytes that a token
    touches, 1 where that is all.
    """

    nbytes: float
    operations: float
    touched: float = 1.0

    def work(self, tokens: int) -> Work:
        """Reading each weight that any of the tokens needs once."""
        share = 1 - (1 - self.touched) ** tokens
        return Work(self.operations * tokens, max(self.nbytes * share, 1.0))


class PromptSpeed:
    """Seconds of a prompt under a placement."""

    def __init__(self, placing: ModelPlacing, chosen: Placement) -> None:
        self._machine, self._sizes = placing.machine, placing.sizes
        processor, graphics = self._machine.processor, placing.pricing.graphics
        self._cpu = Roof(processor.operations_per_second, processor.bytes_per_second)
        self._gpu: Roof | None = None
        if graphics and chosen.uses_gpu:
            self._gpu = Roof(graphics.operations_per_second, graphics.bytes_per_second)
        self._link = self._machine.link if placing.streams else None
        self._layers = [
            _parts(layer, cost, choice)
            for layer, cost, choice in zip(self._sizes.layers, placing.costs, chosen.choices, strict=True)
        ]
        self._attends_on_gpu = [choice.attention == GPU for choice in chosen.choices]
        head = _Part(self._sizes.head.nbytes, 2 * self._sizes.head.weights)
        roof = self._gpu if chosen.ends.head == GPU else self._cpu
        self._head = head.work(1).seconds(roof or self._cpu)

    def seconds(self, prompt: int, chunk: int, batch: int) -> float:
        """From the first token of a prompt to the logits behind the last, read in chunks."""
        step = chunk if any(self._attends_on_gpu) else batch
        total, start = self._head, 0
        while start < prompt:
            tokens = min(step, prompt - start)
            total += self._chunk(tokens, start)
            start += tokens
        return total

    def _chunk(self, tokens: int, start: int) -> float:
        total = 0.0
        for layer, parts, on_gpu in zip(self._sizes.layers, self._layers, self._attends_on_gpu, strict=True):
            roof = self._gpu if on_gpu and self._gpu else self._cpu
            seen = min(start + tokens / 2, layer.window or start + tokens)
            operations = 4 * tokens * seen * layer.heads * layer.head_dim
            scores = Work(operations / SCORES_SHARE, 1.0)
            total += scores.seconds(roof)
            here, there = parts
            streamed = self._streamed(here, tokens)
            on_cpu = sum(part.work(tokens).seconds(self._cpu) for part in here)
            total += sum(part.work(tokens).seconds(self._gpu) for part in there) if self._gpu else 0.0
            total += on_cpu if streamed is None else min(on_cpu, streamed)
        return total

    def _streamed(self, parts: Sequence[_Part], tokens: int) -> float | None:
        """Sending weights to the GPU while it computes with those before them; None: there is no way."""
        gpu, link = self._gpu, self._link
        if gpu is None or link is None:
            return None
        works = [part.work(tokens) for part in parts]
        return sum(max(work.bytes / link.to_gpu, work.seconds(gpu)) for work in works)

    def crossover(self) -> int | None:
        """The least tokens for which sending beats computing on the CPU; None: nothing is there, or never."""
        here = [part for parts in self._layers for part in parts[0]]
        if not here or self._gpu is None:
            return None

        def pays(tokens: int) -> bool:
            streamed = self._streamed(here, tokens)
            on_cpu = sum(part.work(tokens).seconds(self._cpu) for part in here)
            return streamed is not None and streamed < on_cpu

        if not pays(MOST_TOKENS):
            return None
        low, high = 1, MOST_TOKENS
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if pays(middle) else (middle + 1, high)
        return low


def _parts(layer: LayerSizes, costs: LayerCosts, choice: Choice) -> tuple[list[_Part], list[_Part]]:
    """One layer's weights on the CPU, and on the GPU."""
    sides: tuple[list[_Part], list[_Part]] = ([], [])
    always = layer.attention_matrices() + (layer.experts.always() if layer.experts else [])
    own = costs.attention[choice.attention]
    shared = costs.always[choice.attention] if costs.always else None
    nbytes = sum(cost.nbytes for cost in (own, shared) if cost)
    sides[choice.attention].append(_Part(nbytes, 2 * sum(matrix.weights for matrix in always)))
    block = layer.divisible()
    weights = sum(matrix.weights for matrix in block.matrices())
    share = costs.unit_neurons[choice.units] / (layer.experts.count if layer.experts else block.neurons)
    used = layer.experts.used if layer.experts else 1
    touched = layer.experts.used / layer.experts.count if layer.experts else 1.0
    halves = (costs.cpu_bytes[choice.units], 1 - share), (costs.gpu_bytes[choice.units], share)
    for side, (half, part) in zip(sides, halves, strict=True):
        if half:
            side.append(_Part(float(half), 2 * weights * used * part, touched))
    return sides
