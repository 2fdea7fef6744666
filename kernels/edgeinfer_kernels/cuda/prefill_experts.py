"""A prompt's mixture of experts: a chunk's tokens grouped by expert, each expert's matrices used once.

Which tokens go where the host has to know: it waits for the choice once a layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from edgeinfer_kernels.cuda.device_experts import DeviceExperts, DeviceFeedForward, RoutingSpace
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.expert_kernels import GATINGS, choose_experts_kernel
from edgeinfer_kernels.cuda.packing import DeviceMatrix
from edgeinfer_kernels.specification import (
    Activation,
    DecoderSpecification,
    ExpertsSpecification,
    FeedForwardSpecification,
)


@dataclass(frozen=True)
class ScaledRows:
    """Rows of float16 with a scale each: the value is rows · scales."""

    rows: Tensor
    scales: Tensor


@dataclass(frozen=True)
class FeedForwardSlice:
    """A feed-forward, or one expert's rows of matrices that hold them all."""

    gate: DeviceMatrix | None
    up: DeviceMatrix
    down: DeviceMatrix
    gate_bias: Tensor | None
    up_bias: Tensor | None
    hidden: int
    first_hidden: int = 0
    first_out: int = 0

    @classmethod
    def whole(cls, w: DeviceFeedForward) -> "FeedForwardSlice":
        return cls(w.gate, w.up, w.down, w.gate_bias, w.up_bias, w.hidden)

    @classmethod
    def expert(cls, w: DeviceExperts, index: int, width: int) -> "FeedForwardSlice":
        """Expert `index` of a mixture."""
        rows = slice(index * w.hidden, (index + 1) * w.hidden)
        gate_bias = None if w.gate_bias is None else w.gate_bias[rows]
        up_bias = None if w.up_bias is None else w.up_bias[rows]
        return cls(w.gate, w.up, w.down, gate_bias, up_bias, w.hidden, rows.start, index * width)


class DenseRows(Protocol):
    """What multiplies rows with a feed-forward: see `Prefill.dense`."""

    def dense(self, activation: Activation, w: FeedForwardSlice, h: ScaledRows) -> tuple[Tensor, Tensor]: ...


class PrefillExperts:
    """Buffers for the mixtures of a chunk of tokens, taken from the arena."""

    def __init__(self, specification: DecoderSpecification, arena: Arena, chunk: int) -> None:
        self._width = specification.width
        self._routing = RoutingSpace(specification, arena, chunk)
        needed = chunk if self._routing.used else 0
        self._floats = arena.take((needed, self._width), torch.float32)
        self._sum = arena.take((needed, self._width), torch.float32)
        self._gathered = arena.take((needed, self._width), torch.float16)
        self._scales = arena.take((needed,), torch.float32)

    def route_early(
        self, facts: FeedForwardSpecification | ExpertsSpecification, w: DeviceExperts, x: Tensor
    ) -> None:
        """The scores of a router that reads x as it enters the layer; of another, nothing."""
        if isinstance(facts, ExpertsSpecification) and facts.early:
            self._score(w, x)

    def _score(self, w: DeviceExperts, rows: Tensor) -> None:
        scores = self._routing.scores[: len(rows), : w.count]
        torch.mm(rows, w.router_rows.t(), out=scores)
        if w.router_bias is not None:
            scores += w.router_bias[: w.count]

    def read(
        self,
        product: DenseRows,
        facts: ExpertsSpecification,
        w: DeviceExperts,
        h: ScaledRows,
        send: Callable[[Tensor, Tensor], None] | None = None,
    ) -> Tensor:
        """Σ weight · expert(h) of the experts that are here, and the shared expert's part, (tokens, width)
        float32. `send` is given where the chosen experts lie on the host, and their weights.
        """
        tokens = len(h.rows)
        floats = self._floats[:tokens]
        floats.copy_(h.rows)
        floats *= h.scales[:, None]
        if not facts.early:
            self._score(w, floats)
        self._choose(facts, tokens)
        pairs = tokens * facts.used
        ids, weights = self._routing.ids[:pairs], self._routing.weights[:pairs]
        if send is not None:
            send(w.places[1][ids], weights)
        total = self._sum[:tokens].zero_()
        if w.shared is not None:
            y, scales = product.dense(facts.activation, FeedForwardSlice.whole(w.shared), h)
            if w.shared_router_rows is not None:
                scales = scales * torch.sigmoid(floats @ w.shared_router_rows[0])
            torch.mul(y, scales[:, None], out=total)
        for group in _groups(facts, w, ids, weights) if w.here else ():
            self._add_expert(product, facts, w, h, *group, total)
        return total

    def _choose(self, facts: ExpertsSpecification, tokens: int) -> None:
        space = self._routing
        choose_experts_kernel[(tokens,)](
            space.scores, space.scores.stride(0), space.ids, space.weights, facts.scale,
            COUNT=facts.count, USED=facts.used, GATING=GATINGS[facts.gating], NORMALISED=facts.normalised,
            DEPENDENT=False, num_warps=1,
        )  # fmt: skip

    def _add_expert(
        self,
        product: DenseRows,
        facts: ExpertsSpecification,
        w: DeviceExperts,
        h: ScaledRows,
        expert: int,
        index: Tensor,
        weights: Tensor,
        total: Tensor,
    ) -> None:
        count = len(index)
        rows = torch.index_select(h.rows, 0, index, out=self._gathered[:count])
        scales = torch.index_select(h.scales, 0, index, out=self._scales[:count])
        part = FeedForwardSlice.expert(w, expert, self._width)
        y, hidden_scales = product.dense(facts.activation, part, ScaledRows(rows, scales))
        y *= hidden_scales[:, None]
        if w.down_bias is not None:
            y += w.down_bias[expert * self._width : (expert + 1) * self._width]
        y *= weights[:, None]
        total.index_add_(0, index, y)


def _groups(
    facts: ExpertsSpecification, w: DeviceExperts, ids: Tensor, weights: Tensor
) -> list[tuple[int, Tensor, Tensor]]:
    """(place, its tokens, their weights) of every expert in use that lies on the device."""
    places = w.places[0][ids]
    order = torch.argsort(places, stable=True)
    counts = torch.bincount(places + 1, minlength=w.here + 1).tolist()
    tokens_of, weights = order // facts.used, weights[order]
    groups, first = [], int(counts[0])
    for place, count in enumerate(counts[1:]):
        if count:
            groups.append((place, tokens_of[first : first + count], weights[first : first + count]))
        first += count
    return groups
