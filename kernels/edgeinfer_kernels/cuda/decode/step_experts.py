"""The MoE block of a decode step: router, selection, experts, shared expert, residual."""

from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.decode.step_norms import NextNorm, Source
from edgeinfer_kernels.cuda.decode.workspace import ROWS
from edgeinfer_kernels.cuda.offload.cpu_stages import DecodeExchange
from edgeinfer_kernels.cuda.offload.device_experts import DeviceExperts, DeviceFeedForward
from edgeinfer_kernels.cuda.prefill.expert_kernels import (
    GATINGS,
    SHARED,
    SHARED_AND_WEIGHED,
    UNSHARED,
    choose_experts_kernel,
    expert_down_kernel,
    expert_gated_kernel,
)
from edgeinfer_kernels.cuda.triton_ops.activations import ACTIVATIONS
from edgeinfer_kernels.specification import ExpertsSpecification, FeedForwardSpecification


class StepExperts:
    """Launches the kernels of an MoE block through `launches`; `turns`: the CPU stages, if the CPU has some
    of the experts.
    """

    def __init__(self, launches: StepLaunches, turns: DecodeExchange | None = None) -> None:
        self._launches = launches
        self._turns = turns

    def route_early(
        self, facts: FeedForwardSpecification | ExpertsSpecification, w: DeviceExperts, tokens: int
    ) -> None:
        """Compute the scores of a pre-attention router, which reads the layer's input x; does nothing for
        other routers.
        """
        if not isinstance(facts, ExpertsSpecification) or not facts.early:
            return
        launches = self._launches
        space = launches.workspace
        launches.join(None, None, 0.0, NextNorm(facts.norm, None, None), space.early, tokens)
        self._score(w, Source(space.early, space.squares[0]), tokens)

    def _score(self, w: DeviceExperts, source: Source, tokens: int) -> None:
        launches = self._launches
        scores = launches.workspace.routing.scores
        launches.rows((w.router,), source, scores, w.router_bias, "output", tokens)

    def launch(
        self,
        facts: FeedForwardSpecification | ExpertsSpecification,
        w: DeviceExperts,
        source: Source,
        following: NextNorm,
        target: Source,
        tokens: int,
        turn: int = 0,
    ) -> None:
        """x += scale · Σ weight · expert(h), plus the shared expert; its norm to the target. `turn`: the CPU
        stage that computes the CPU's experts in parallel.
        """
        assert isinstance(facts, ExpertsSpecification)
        launches, space = self._launches, self._launches.workspace
        if not facts.early:
            self._score(w, source, tokens)
        launches.launch(
            choose_experts_kernel,
            (tokens,),
            space.routing.scores,
            space.routing.scores.stride(0),
            space.routing.ids,
            space.routing.weights,
            facts.scale,
            COUNT=facts.count,
            USED=facts.used,
            GATING=GATINGS[facts.gating],
            NORMALIZED=facts.normalized,
            warps=1,
        )
        turns = self._turns if turn else None
        if turns:
            turns.send(launches, turn, tokens, facts.used, w.places)
        if w.shared is not None:
            self._shared(facts, w, w.shared, source, tokens)
        if w.here:
            self._gated(facts, w, source, tokens)
        y = space.y if w.here or w.shared is not None else None
        if y is not None:
            self._down(facts, w, tokens)
        if turns:
            scale = facts.residual_scale
            turns.receive(launches, turn, y, scale, following, target.activations, tokens)
        else:
            launches.join(y, None, facts.residual_scale, following, target.activations, tokens)

    def _shared(
        self,
        facts: ExpertsSpecification,
        w: DeviceExperts,
        shared: DeviceFeedForward,
        source: Source,
        tokens: int,
    ) -> None:
        """Write the shared expert's result to y, and compute the score of its gate."""
        launches, space = self._launches, self._launches.workspace
        launches.gated(facts.activation, shared, source, space.shared_hidden, tokens)
        hidden = Source(space.shared_hidden, source.squares)
        launches.rows((shared.down,), hidden, space.y, shared.down_bias, "down", tokens)
        if w.shared_router is not None:
            scores = space.routing.shared_scores
            launches.rows((w.shared_router,), source, scores, None, "output", tokens)

    def _gated(self, facts: ExpertsSpecification, w: DeviceExperts, source: Source, tokens: int) -> None:
        launches, space = self._launches, self._launches.workspace
        out, blocks = space.expert_hidden, source.activations.blocks
        launches.launch(
            expert_gated_kernel,
            (w.hidden // ROWS, tokens * facts.used),
            w.gate.parts,
            w.up.parts,
            source.activations.words,
            out.words,
            launches.or_nothing(w.gate_bias),
            launches.or_nothing(w.up_bias),
            space.routing.ids,
            source.squares,
            source.norm.epsilon if source.norm else 0.0,
            EXPERT_ROWS=w.hidden,
            USED=facts.used,
            HIDDEN_BLOCKS=out.blocks,
            HIDDEN_PLANES=out.planes,
            STEP=launches.tuning.gated.step_for(blocks),
            GATE=w.gate.shapes.tile,
            UP=w.up.shapes.tile,
            BIAS=w.up_bias is not None,
            ACTIVATION=ACTIVATIONS[facts.activation],
            warps=launches.tuning.gated.warps_for(blocks),
            **launches.of_source(source),
        )

    def _down(self, facts: ExpertsSpecification, w: DeviceExperts, tokens: int) -> None:
        launches, space = self._launches, self._launches.workspace
        read, width = space.expert_hidden, launches.model.specification.width
        kind = UNSHARED
        if w.shared is not None:
            kind = SHARED if w.shared_router is None else SHARED_AND_WEIGHED
        launches.launch(
            expert_down_kernel,
            (width // ROWS, tokens),
            w.down.parts,
            read.words,
            space.y,
            space.y.stride(0),
            launches.or_nothing(w.down_bias),
            space.routing.ids,
            space.routing.weights,
            space.routing.shared_scores,
            space.routing.shared_scores.stride(0),
            WIDTH=width,
            USED=facts.used,
            BLOCKS=read.blocks,
            PLANES=read.planes,
            STEP=launches.tuning.down.step_for(read.blocks),
            TILE=w.down.shapes.tile,
            BIAS=w.down_bias is not None,
            SHARED_EXPERT=kind,
            warps=launches.tuning.down.warps_for(read.blocks),
        )
