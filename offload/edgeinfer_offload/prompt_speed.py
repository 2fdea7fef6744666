"""How fast a prompt is read: where the weights lie, or on the GPU after sending them over the link."""

from dataclasses import dataclass

from edgeinfer_kernels.model_sizes import LayerSizes
from edgeinfer_offload.layer_costs import LayerCosts
from edgeinfer_offload.machine import Graphics
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
    touches, 1 where that is all. `sent`: bytes per second at which they can be sent to the GPU, or 0.
    """

    nbytes: float
    operations: float
    touched: float = 1.0
    sent: float = 0.0

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
        sending = graphics if placing.streams else None
        self._layers = [
            _parts(layer, cost, choice, self._sent_rate(layer, choice, sending))
            for layer, cost, choice in zip(self._sizes.layers, placing.costs, chosen.choices, strict=True)
        ]
        self._attends_on_gpu = [choice.attention == GPU for choice in chosen.choices]
        head = _Part(self._sizes.head.nbytes, 2 * self._sizes.head.weights)
        roof = self._gpu if chosen.ends.head == GPU else self._cpu
        self._head = head.work(1).seconds(roof or self._cpu)

    def _sent_rate(self, layer: LayerSizes, choice: Choice, graphics: Graphics | None) -> float:
        """Bytes per second at which a layer's feed-forward can be sent; 0: it is a mixture, has a norm behind
        its sum, or follows attention on the CPU.
        """
        link, block = self._machine.link, layer.feed_forward
        if graphics is None or link is None or block is None or choice.attention != GPU or block.post_normed:
            return 0.0
        seconds = sum(m.nbytes / graphics.packed_rate(m.format, link) for m in block.matrices())
        return sum(m.nbytes for m in block.matrices()) / seconds

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
            total += sum(part.work(tokens).seconds(self._gpu) for part in there) if self._gpu else 0.0
            total += sum(self._on_cpu_or_sent(part, tokens) for part in here)
        return total

    def _on_cpu_or_sent(self, part: _Part, tokens: int) -> float:
        """Seconds with weights of the CPU, there or on the GPU, whichever takes less."""
        on_cpu = part.work(tokens).seconds(self._cpu)
        return min(on_cpu, self._streamed(part, tokens)) if part.sent else on_cpu

    def _streamed(self, part: _Part, tokens: int) -> float:
        """Seconds of sending weights to the GPU, and of computing with them."""
        work = part.work(tokens)
        assert self._gpu is not None
        return work.bytes / part.sent + work.seconds(self._gpu)

    def crossover(self) -> int | None:
        """The least tokens for which sending beats computing on the CPU; None: nothing is there, or never."""
        here = [part for parts in self._layers for part in parts[0] if part.sent]
        if not here or self._gpu is None:
            return None

        def pays(tokens: int) -> bool:
            streamed = sum(self._streamed(part, tokens) for part in here)
            return streamed < sum(part.work(tokens).seconds(self._cpu) for part in here)

        if not pays(MOST_TOKENS):
            return None
        low, high = 1, MOST_TOKENS
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if pays(middle) else (middle + 1, high)
        return low


def _parts(
    layer: LayerSizes, costs: LayerCosts, choice: Choice, sent: float
) -> tuple[list[_Part], list[_Part]]:
    """One layer's weights on the CPU, of which the feed-forward may be `sent` so fast, and on the GPU."""
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
            side.append(_Part(float(half), 2 * weights * used * part, touched, sent))
    return sides
