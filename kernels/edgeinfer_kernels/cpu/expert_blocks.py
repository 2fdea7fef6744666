"""Builds the structure that the MoE block kernel reads from the specification and the weights."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.cpu.blocks import BlockBuilder
from edgeinfer_kernels.cpu.layout.packed_matrix import bits, is_float_format, padded_vector
from edgeinfer_kernels.cpu.runtime.abi import ACTIVATION_CODES, EXPERTS, GATING_CODES, quantized_bytes
from edgeinfer_kernels.layer_cache import padded
from edgeinfer_kernels.sizes.cpu_workspace import aligned
from edgeinfer_kernels.specification import ExpertsSpecification
from edgeinfer_kernels.weights import ExpertWeights, FeedForwardWeights, Matrix

Counts = npt.NDArray[np.int64]


class RoutingRows(NamedTuple):
    """Destination of a layer's expert ids: an address, and the stride in bytes between tokens."""

    ids: int
    stride: int


class GivenRouting(NamedTuple):
    """Where a device writes the experts that it selected, as `RoutingRows`, and the address of their
    weights.
    """

    rows: RoutingRows
    weights: int


class ExpertBlockBuilder:
    """Builds EXPERTS structures with the arena, workspace and packed matrices of `builder`."""

    def __init__(self, builder: BlockBuilder) -> None:
        self._builder = builder

    def experts(self, facts: ExpertsSpecification, w: ExpertWeights, routing: RoutingRows | None) -> int:
        """An EXPERTS structure; it writes the selected experts to `routing` if given."""
        builder, rows = self._builder, self._builder.workspace.rows
        scores, scores_stride = rows("expert.scores")
        ids, ids_stride = routing or RoutingRows(rows("expert.ids")[0], 8 * facts.used)
        first_readers = [w.ffn_gate_inp, *w.stacks()[:1], w.ffn_gate_exps]
        if w.shared is not None:
            first_readers += [w.shared.ffn_up, *([w.shared.ffn_gate] if w.shared.ffn_gate else [])]
        return builder.arena.fill(
            EXPERTS,
            router=builder.matrix(w.ffn_gate_inp, w.ffn_gate_inp_bias),
            early=int(facts.early),
            gating=GATING_CODES[facts.gating],
            normalized=int(facts.normalized),
            weight_scale=bits(facts.scale),
            scores=scores,
            scores_stride=scores_stride,
            ids=ids,
            ids_stride=ids_stride,
            weights=rows("expert.weights")[0],
            normed=builder.input("normed", builder.width, first_readers),
            **self._own(facts, w),
            **self._early(facts, w),
            **self._shared(w),
        )

    def chosen_experts(
        self, facts: ExpertsSpecification, w: ExpertWeights, given: GivenRouting, asked: Counts | None = None
    ) -> int:
        """An EXPERTS structure for experts that a device selects. It may have only some experts of the layer;
        it must have all if it counts the requests of each in `asked`.
        """
        builder = self._builder
        return builder.arena.fill(
            EXPERTS,
            ids=given.rows.ids,
            ids_stride=given.rows.stride,
            weights=given.weights,
            asked=0 if asked is None else builder.arena.keep(asked),
            normed=builder.input("normed", builder.width, [w.ffn_up_exps, w.ffn_gate_exps]),
            **self._own(facts, w),
        )

    def _own(self, facts: ExpertsSpecification, w: ExpertWeights) -> dict[str, int]:
        """The fields of the experts themselves."""
        builder, rows = self._builder, self._builder.workspace.rows
        hidden, width = w.ffn_up_exps.rows, builder.width
        return {
            "norm": builder.norm(facts.norm, width, w.ffn_norm),
            "count": w.ffn_up_exps.experts,
            "used": facts.used,
            "activation": ACTIVATION_CODES[facts.activation],
            "residual_scale": bits(facts.residual_scale),
            "places": rows("expert.places")[0],
            "entries": rows("expert.entries")[0],
            "active": rows("expert.active")[0],
            "gathered": self._pair_input("expert.gathered", width, [w.ffn_up_exps, w.ffn_gate_exps]),
            "hidden": self._pair_input("expert.hidden", hidden, [w.ffn_down_exps], always=True),
            "gate": rows("expert.gate")[0],
            "gate_matrix": builder.matrix(w.ffn_gate_exps, w.ffn_gate_exps_bias),
            "up_matrix": builder.matrix(w.ffn_up_exps, w.ffn_up_exps_bias),
            "down_matrix": builder.matrix(w.ffn_down_exps, w.ffn_down_exps_bias),
            "out": rows("expert.out")[0],
            "out_stride": aligned(4 * padded(width)),
            **builder.scratch(),
        }

    def _pair_input(self, name: str, columns: int, readers: list[Matrix], always: bool = False) -> int:
        """An INPUT with a row for each token-expert assignment; float32 only if read, or `always`."""
        strides = aligned(4 * padded(columns)), aligned(quantized_bytes(padded(columns)))
        keep_floats = always or any(map(is_float_format, readers))
        return self._builder.input(name, columns, readers, strides, keep_floats)

    def _early(self, facts: ExpertsSpecification, w: ExpertWeights) -> dict[str, int]:
        if not facts.early:
            return {}
        builder = self._builder
        return {
            "router_norm": builder.norm(facts.norm, builder.width, None),
            "router_input": builder.input("router", builder.width, [w.ffn_gate_inp]),
        }

    def _shared(self, w: ExpertWeights) -> dict[str, int]:
        if w.shared is None:
            return {}
        builder, rows = self._builder, self._builder.workspace.rows
        shared: FeedForwardWeights = w.shared
        assert shared.ffn_gate is not None
        gate, _ = rows("gate")
        out, out_stride = rows("projected")
        return {
            "shared_gate_matrix": builder.matrix(shared.ffn_gate),
            "shared_up_matrix": builder.matrix(shared.ffn_up),
            "shared_down_matrix": builder.matrix(shared.ffn_down),
            "shared_hidden": builder.input("hidden", shared.ffn_up.rows, [shared.ffn_down]),
            "shared_gate": gate,
            "shared_out": out,
            "shared_out_stride": out_stride,
            "shared_router": builder.arena.keep(padded_vector(w.ffn_gate_inp_shexp)),
        }
