"""The kernel launches of one decode step: 1 to 8 tokens from ids to logits, entirely on the device.

    embed | per layer: q, k, v | attention | output + residual | gate and up | down + residual | head

In an MoE layer, experts replace gate, up and down (`step_experts.py`).

If a block has a post-norm, or the norm is a layer norm, a join kernel follows the block. In a split model, x
is sent to the host at its CPU stages and comes back with the CPU's sum added (`cpu_stages.py`).
"""

from torch import Tensor

from edgeinfer_kernels.cuda.decode.step_experts import StepExperts
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.decode.step_norms import NextNorm, Source
from edgeinfer_kernels.cuda.decode.workspace import Activations, Workspace
from edgeinfer_kernels.cuda.offload.cpu_stages import DecodeExchange
from edgeinfer_kernels.cuda.offload.device_experts import DeviceExperts, DeviceFeedForward
from edgeinfer_kernels.cuda.tuning.step_shapes import RowKernel, Tuning
from edgeinfer_kernels.cuda.weights.device_model import DeviceLayer, DeviceModel
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.specification import (
    AttentionSpecification,
    FeedForwardSpecification,
    LayerSpecification,
)


class DecodeStep:
    """The kernels of a step, launched in order on the current stream.

    `turns`: the CPU stages of a split model, whose step starts with hidden states from the host.
    """

    def __init__(self, launches: StepLaunches, turns: DecodeExchange | None = None) -> None:
        self.launches = launches
        self.turns = turns
        self.experts = StepExperts(launches, turns)

    @property
    def model(self) -> DeviceModel:
        return self.launches.model

    @property
    def workspace(self) -> Workspace:
        return self.launches.workspace

    @property
    def tuning(self) -> Tuning:
        """The tile configs of the kernels; captured graphs keep their previous configs."""
        return self.launches.tuning

    @tuning.setter
    def tuning(self, tuning: Tuning) -> None:
        self.launches.tuning = tuning

    def launch(self, tokens: int) -> None:
        """From `state` to `logits`; the new keys and values are written to the caches."""
        source = self._enter(tokens) if self.turns else self._embed(tokens)
        space, layers = self.workspace, self.model.layers
        for index, (facts, layer) in enumerate(zip(self.model.specification.layers, layers, strict=True)):
            ffn, post = layer.feed_forward, layer.attention.post_norm
            if isinstance(ffn, DeviceExperts):
                self.experts.route_early(facts.feed_forward, ffn, tokens)
            self._attention(facts.attention, layer, source, tokens)
            source = self._close_block(
                layer.attention.output,
                layer.attention.output_bias,
                space.mixed,
                NextNorm(facts.attention.norm, post, None) if post is not None else None,
                facts.attention.residual_scale,
                NextNorm(facts.feed_forward.norm, ffn.norm, ffn.norm_bias),
                Source(space.entering[1], space.squares[1]),
                "output",
                tokens,
            )
            source = self._second_block(index, facts, layer, source, tokens)
            turn = self.turns.turns.behind[index] if self.turns else 0
            if self.turns and turn:
                self.turns.send(self.launches, turn, tokens)
                source = self._receive(turn, None, 0.0, index, tokens)
        self.launches.head(source, tokens)

    def _second_block(
        self, index: int, facts: LayerSpecification, layer: DeviceLayer, source: Source, tokens: int
    ) -> Source:
        """The feed-forward or MoE block of a layer, with its CPU stage if it has one."""
        space, ffn = self.workspace, layer.feed_forward
        turn = self.turns.turns.within[index] if self.turns else 0
        if isinstance(ffn, DeviceExperts):
            target = Source(space.entering[0], space.squares[0])
            above = self._norm_above(index)
            self.experts.launch(facts.feed_forward, ffn, source, above, target, tokens, turn)
            return target
        assert isinstance(facts.feed_forward, FeedForwardSpecification)
        if turn:
            return self._shared_with_host(index, facts.feed_forward, ffn, source, turn, tokens)
        hidden = space.hidden(ffn)
        self.launches.gated(facts.feed_forward.activation, ffn, source, hidden, tokens)
        return self._close_block(
            ffn.down,
            ffn.down_bias,
            hidden,
            NextNorm(facts.feed_forward.norm, ffn.post_norm, None) if ffn.post_norm is not None else None,
            facts.feed_forward.residual_scale,
            self._norm_above(index),
            Source(space.entering[0], space.squares[0]),
            "down",
            tokens,
        )

    def _shared_with_host(
        self,
        index: int,
        facts: FeedForwardSpecification,
        ffn: DeviceFeedForward,
        source: Source,
        turn: int,
        tokens: int,
    ) -> Source:
        """A dense feed-forward of which the CPU has some or all neurons: both parts run in parallel, with one
        sum.
        """
        assert self.turns is not None
        self.turns.send(self.launches, turn, tokens)
        if not ffn.hidden:
            return self._receive(turn, None, 0.0, index, tokens)
        space = self.workspace
        hidden = space.hidden(ffn)
        self.launches.gated(facts.activation, ffn, source, hidden, tokens)
        read = Source(hidden, source.squares)
        self.launches.rows((ffn.down,), read, space.y, ffn.down_bias, "down", tokens)
        return self._receive(turn, space.y, facts.residual_scale, index, tokens)

    def _receive(self, turn: int, y: Tensor | None, scale: float, index: int, tokens: int) -> Source:
        """Set x to the host's hidden states plus scale·y, and apply the norm after layer `index`."""
        assert self.turns is not None
        target = Source(self.workspace.entering[0], self.workspace.squares[0])
        norm = self._norm_above(index)
        self.turns.receive(self.launches, turn, y, scale, norm, target.activations, tokens)
        return target

    def _norm_above(self, index: int) -> NextNorm:
        """The norm after a layer: the first norm of the next layer, or that of the head."""
        model = self.model
        if index + 1 == len(model.layers):
            return NextNorm(model.specification.norm, model.norm, model.norm_bias)
        attention = model.layers[index + 1].attention
        return NextNorm(
            model.specification.layers[index + 1].attention.norm, attention.norm, attention.norm_bias
        )

    def _embed(self, tokens: int) -> Source:
        space, norm = self.workspace, self._norm_above(-1)
        out, squares = space.entering[0], space.squares[0]
        self.launches.embed(norm.weight if norm.folds else None, out, squares, tokens)
        if norm.folds:
            return Source(out, squares, norm.facts if norm.weight is not None else None)
        self.launches.join(None, None, 0.0, norm, out, tokens)
        return Source(out, squares)

    def _enter(self, tokens: int) -> Source:
        """The host's hidden states after stage 1, as the input of the first layer."""
        return self._receive(1, None, 0.0, -1, tokens)

    def _attention(
        self, facts: AttentionSpecification, layer: DeviceLayer, source: Source, tokens: int
    ) -> None:
        """The projections q, k and v, up to two formats per launch; then attention."""
        bias, first_row = layer.attention.qkv_bias, 0
        parts = layer.attention.qkv.parts
        for index in range(0, len(parts), 2):
            pair = parts[index : index + 2]
            out = self.workspace.qkv[:, first_row:]
            part_bias = None if bias is None else bias[first_row:]
            self.launches.rows(pair, source, out, part_bias, "qkv", tokens)
            first_row += sum(part.shapes.padded_rows for part in pair)
        self.launches.attend(facts, layer, tokens)

    def _close_block(
        self,
        matrix: DeviceMatrix,
        bias: Tensor | None,
        read: Activations,
        post_norm: NextNorm | None,
        scale: float,
        following: NextNorm,
        target: Source,
        kernel: RowKernel,
        tokens: int,
    ) -> Source:
        """x += the block's result; also apply the next norm to x, as far as this kernel can."""
        space = self.workspace
        if post_norm is not None or not following.folds:
            self.launches.rows((matrix,), Source(read, target.squares), space.y, bias, kernel, tokens)
            self.launches.join(space.y, post_norm, scale, following, target.activations, tokens)
            return target
        self.launches.residual(matrix, bias, read, scale, following.weight, target, kernel, tokens)
        if following.weight is not None:
            target.norm = following.facts
        return target

    def head_of(self, tokens: int) -> None:
        """Compute the logits of hidden states that are already in the workspace's x."""
        out, model = self.workspace.entering[0], self.model
        norm = NextNorm(model.specification.norm, model.norm, model.norm_bias)
        self.launches.join(None, None, 0.0, norm, out, tokens)
        self.launches.head(Source(out, self.workspace.squares[0]), tokens)
