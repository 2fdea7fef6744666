"""The launches of one decode step: 1 to 8 tokens from their ids to logits, everything on the device.

    embed | per layer: q, k, v | attention | output + residual | gate and up | down + residual | head

Where a norm stands behind a block, or is a layer norm, a join kernel follows the block.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from edgeinfer_kernels.cuda import row_kernels as kernels
from edgeinfer_kernels.cuda.activations import ACTIVATIONS
from edgeinfer_kernels.cuda.decode_attention import decode_attention_kernel
from edgeinfer_kernels.cuda.device_model import DeviceFeedForward, DeviceLayer, DeviceModel, Stack
from edgeinfer_kernels.cuda.device_sizes import (
    MOST_TOKENS,
    STATE_WORDS,
    attention_rows,
    head_dimensions,
)
from edgeinfer_kernels.cuda.packing import DeviceMatrix
from edgeinfer_kernels.cuda.step_shapes import Shape, Tuning, next_power_of_two
from edgeinfer_kernels.cuda.workspace import CACHED_AT, ROWS, Activations, Workspace
from edgeinfer_kernels.specification import (
    AttentionSpecification,
    FeedForwardSpecification,
    NormSpecification,
)

__all__ = ["CACHED_AT", "MOST_TOKENS", "ROWS", "STATE_WORDS", "DecodeStep", "Tuning", "Workspace"]

QK_NORMS = {"none": 0, "head": 1, "row": 2}


@dataclass
class _Source:
    """What a projection reads: activations, and the squares of a norm that is still to be applied."""

    activations: Activations
    squares: Tensor
    norm: NormSpecification | None = None


class DecodeStep:
    """Launches a step's kernels on the current stream; `dependent`: with programmatic dependent launch."""

    def __init__(self, model: DeviceModel, workspace: Workspace, tuning: Tuning, *, dependent: bool) -> None:
        self.model = model
        self.workspace = workspace
        self.tuning = tuning
        self.dependent = dependent

    def launch(self, tokens: int) -> None:
        """From `state` to `logits`, and the new keys and values into the caches."""
        source = self._embed(tokens)
        layers = self.model.layers
        for index, (facts, layer) in enumerate(zip(self.model.specification.layers, layers, strict=True)):
            self._attention(facts.attention, layer, source, tokens)
            ffn = layer.feed_forward
            source = self._close_block(
                layer.attention.output,
                layer.attention.output_bias,
                self.workspace.mixed,
                facts.attention.norm,
                layer.attention.post_norm,
                facts.attention.residual_scale,
                (facts.feed_forward.norm, ffn.norm, ffn.norm_bias),
                1,
                self.tuning.output,
                tokens,
            )
            self._gated(facts.feed_forward, ffn, source, tokens)
            following = layers[index + 1] if index + 1 < len(layers) else None
            source = self._close_block(
                ffn.down,
                ffn.down_bias,
                self.workspace.hidden,
                facts.feed_forward.norm,
                ffn.post_norm,
                facts.feed_forward.residual_scale,
                self._next_norm(index, following),
                0,
                self.tuning.down,
                tokens,
            )
        self._head(source, tokens)

    def _next_norm(
        self, index: int, following: DeviceLayer | None
    ) -> tuple[NormSpecification, Tensor | None, Tensor | None]:
        if following is None:
            return self.model.specification.norm, self.model.norm, self.model.norm_bias
        facts = self.model.specification.layers[index + 1].attention
        return facts.norm, following.attention.norm, following.attention.norm_bias

    def _launch(
        self, kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, **constants: Any
    ) -> Any:
        """The compiled kernel; None from the interpreter."""
        options: dict[str, Any] = {"launch_pdl": True} if self.dependent else {}
        return kernel[grid](*arguments, **constants, DEPENDENT=self.dependent, num_warps=warps, **options)

    def _shape(self, wished: Shape, tokens: int) -> Shape:
        return wished if tokens == 1 else self.tuning.several

    def _or_nothing(self, tensor: Tensor | None) -> Tensor:
        return self.workspace.nothing if tensor is None else tensor

    def _embed(self, tokens: int) -> _Source:
        model, space = self.model, self.workspace
        facts, first = model.specification, model.layers[0].attention
        norm = facts.layers[0].attention.norm
        out, squares = space.entering[0], space.squares[0]
        folded = norm.kind == "rms" and first.norm_bias is None
        gain = first.norm if folded else None
        self._launch(
            kernels.embed_kernel,
            (-(-out.blocks // 8), tokens),
            model.embedding.parts,
            space.state,
            space.x,
            self._or_nothing(gain),
            out.words,
            squares,
            facts.embedding_scale,
            WIDTH=facts.width,
            COUNT=squares.shape[1],
            BLOCKS=out.blocks,
            IN_BLOCKS=model.embedding.shapes.blocks,
            PLANES=out.planes,
            GAIN=gain is not None,
            TILE=model.embedding.shapes.tile,
            warps=1,
        )
        if first.norm is None or folded:
            return _Source(out, squares, norm if first.norm is not None else None)
        self._join(None, None, None, 0.0, (norm, first.norm, first.norm_bias), out, tokens)
        return _Source(out, squares)

    def _attention(
        self, facts: AttentionSpecification, layer: DeviceLayer, source: _Source, tokens: int
    ) -> None:
        attention, space, tuning = layer.attention, self.workspace, self.tuning
        self._project(attention.qkv, attention.qkv_bias, source, tokens)
        group, out = facts.heads // facts.kv_heads, space.mixed
        k_at = facts.heads * facts.head_dim
        rows = attention_rows(facts.heads, facts.kv_heads, tokens)
        cache, direct = layer.cache, facts.head_dim % 16 == 0
        self._launch(
            decode_attention_kernel,
            (facts.kv_heads, tuning.splits),
            space.qkv,
            space.qkv.shape[1],
            cache.keys,
            cache.key_scales,
            cache.values,
            cache.value_scales,
            self.model.positions,
            space.state,
            attention.table,
            self._or_nothing(attention.q_norm),
            self._or_nothing(attention.k_norm),
            facts.norm.epsilon,
            facts.scale,
            facts.soft_cap,
            space.parts,
            space.peaks,
            space.arrived,
            out.words,
            space.flat,
            KV_HEADS=facts.kv_heads,
            GROUP=group,
            HEAD_DIM=facts.head_dim,
            DIMENSIONS=head_dimensions(facts.head_dim),
            K_AT=k_at,
            V_AT=k_at + facts.kv_heads * facts.head_dim,
            TOKENS=tokens,
            QUERIES=rows,
            SPLITS=tuning.splits,
            POSITIONS=max(16, min(tuning.positions, 4096 // head_dimensions(facts.head_dim))),
            WINDOW=facts.window,
            QK_NORM=QK_NORMS[facts.qk_norm],
            CAPPED=facts.soft_cap != 0,
            QUANTISED=self.model.quantised_cache,
            BLOCKS=out.blocks,
            PLANES=out.planes,
            DIRECT=direct,
            warps=tuning.attention_warps * max(1, rows // 16),
        )
        if not direct:
            self._requantise(space.flat, facts.heads * facts.head_dim, out, tokens)

    def _project(self, stack: Stack, bias: Tensor | None, source: _Source, tokens: int) -> None:
        """Rows of all matrices of the stack, two formats a launch."""
        out, first_row = self.workspace.qkv, 0
        for index in range(0, len(stack.parts), 2):
            parts = stack.parts[index : index + 2]
            programs = [part.shapes.padded_rows // ROWS for part in parts]
            self._rows(
                parts,
                programs,
                source,
                out[:, first_row:],
                out.shape[1],
                None if bias is None else bias[first_row:],
                self.tuning.qkv,
                tokens,
            )
            first_row += sum(programs) * ROWS

    def _rows(
        self,
        parts: tuple[DeviceMatrix, ...],
        programs: list[int],
        source: _Source,
        y: Tensor,
        stride: int,
        bias: Tensor | None,
        shape: Shape,
        tokens: int,
    ) -> None:
        read, shape = source.activations, self._shape(shape, tokens)
        self._launch(
            kernels.rows_kernel,
            (sum(programs),),
            parts[0].parts,
            parts[-1].parts,
            read.words,
            y,
            self._or_nothing(bias),
            source.squares,
            source.norm.epsilon if source.norm else 0.0,
            stride,
            FIRST_PROGRAMS=programs[0],
            BLOCKS=read.blocks,
            PLANES=read.planes,
            STEP=shape.step_for(read.blocks),
            TOKENS=tokens,
            FIRST=parts[0].shapes.tile,
            SECOND=parts[-1].shapes.tile,
            BIAS=bias is not None,
            NORM=int(source.norm is not None),
            COUNT=source.squares.shape[1],
            WIDTH=self.model.specification.width,
            warps=shape.warps_for(read.blocks),
        )

    def _gated(
        self, facts: FeedForwardSpecification, ffn: DeviceFeedForward, source: _Source, tokens: int
    ) -> None:
        read, out, shape = source.activations, self.workspace.hidden, self._shape(self.tuning.gated, tokens)
        gate = ffn.gate or ffn.up
        self._launch(
            kernels.gated_kernel,
            (ffn.up.shapes.padded_rows // ROWS,),
            gate.parts,
            ffn.up.parts,
            read.words,
            out.words,
            self._or_nothing(ffn.gate_bias),
            self._or_nothing(ffn.up_bias),
            source.squares,
            source.norm.epsilon if source.norm else 0.0,
            BLOCKS=read.blocks,
            PLANES=read.planes,
            HIDDEN_BLOCKS=out.blocks,
            HIDDEN_PLANES=out.planes,
            STEP=shape.step_for(read.blocks),
            TOKENS=tokens,
            GATE=gate.shapes.tile,
            UP=ffn.up.shapes.tile,
            GATED=ffn.gate is not None,
            BIAS=ffn.up_bias is not None,
            ACTIVATION=ACTIVATIONS[facts.activation],
            NORM=int(source.norm is not None),
            COUNT=source.squares.shape[1],
            WIDTH=self.model.specification.width,
            warps=shape.warps_for(read.blocks),
        )

    def _close_block(
        self,
        matrix: DeviceMatrix,
        bias: Tensor | None,
        read: Activations,
        norm: NormSpecification,
        post_norm: Tensor | None,
        scale: float,
        following: tuple[NormSpecification, Tensor | None, Tensor | None],
        index: int,
        shape: Shape,
        tokens: int,
    ) -> _Source:
        """x += the block's result; x normalised for what follows, as far as this kernel can."""
        space = self.workspace
        out, squares = space.entering[index], space.squares[index]
        next_norm, weight, next_bias = following
        shape = self._shape(shape, tokens)
        foldable = weight is None or (next_norm.kind == "rms" and next_bias is None)
        if post_norm is not None or not foldable:
            source = _Source(read, squares)
            programs = [matrix.shapes.padded_rows // ROWS]
            self._rows((matrix,), programs, source, space.y, space.y.shape[1], bias, shape, tokens)
            self._join(space.y, post_norm, norm, scale, following, out, tokens)
            return _Source(out, squares)
        self._launch(
            kernels.residual_kernel,
            (matrix.shapes.padded_rows // ROWS,),
            matrix.parts,
            read.words,
            space.x,
            self._or_nothing(bias),
            scale,
            self._or_nothing(weight),
            out.words,
            squares,
            WIDTH=self.model.specification.width,
            BLOCKS=read.blocks,
            PLANES=read.planes,
            OUT_BLOCKS=out.blocks,
            OUT_PLANES=out.planes,
            STEP=shape.step_for(read.blocks),
            TOKENS=tokens,
            TILE=matrix.shapes.tile,
            BIAS=bias is not None,
            GAIN=weight is not None,
            warps=shape.warps_for(read.blocks),
        )
        return _Source(out, squares, next_norm if weight is not None else None)

    def _join(
        self,
        y: Tensor | None,
        post_norm: Tensor | None,
        post_facts: NormSpecification | None,
        scale: float,
        following: tuple[NormSpecification, Tensor | None, Tensor | None],
        out: Activations,
        tokens: int,
    ) -> None:
        """x += scale·post_norm(y), or x alone without y; then its norm into `out`."""
        space, width = self.workspace, self.model.specification.width
        norm, weight, bias = following
        read = space.x if y is None else y
        self._launch(
            kernels.join_kernel,
            (tokens,),
            read,
            read.shape[1],
            space.x,
            scale,
            self._or_nothing(post_norm),
            post_facts.epsilon if post_facts else 0.0,
            self._or_nothing(weight),
            self._or_nothing(bias),
            norm.epsilon,
            out.words,
            WIDTH=width,
            GROUPS=next_power_of_two(-(-width // 16)),
            BLOCKS=out.blocks,
            PLANES=out.planes,
            ADDS=y is not None,
            POST=post_norm is not None,
            NORM=weight is not None,
            LAYER=norm.kind == "layer",
            BIAS=bias is not None,
            warps=8,
        )

    def _requantise(self, values: Tensor, width: int, out: Activations, tokens: int) -> None:
        """Rows of floats as activations."""
        nothing = self.workspace.nothing
        self._launch(
            kernels.join_kernel,
            (tokens,),
            values,
            width,
            nothing,
            0.0,
            nothing,
            0.0,
            nothing,
            nothing,
            0.0,
            out.words,
            WIDTH=width,
            GROUPS=next_power_of_two(-(-width // 16)),
            BLOCKS=out.blocks,
            PLANES=out.planes,
            ADDS=False,
            POST=False,
            NORM=False,
            LAYER=False,
            BIAS=False,
            warps=4,
        )

    def head_of(self, tokens: int) -> None:
        """Logits of rows that lie in the workspace's x already."""
        out = self.workspace.entering[0]
        model = self.model
        norm = model.specification.norm, model.norm, model.norm_bias
        self._join(None, None, None, 0.0, norm, out, tokens)
        self._head(_Source(out, self.workspace.squares[0]), tokens)

    def _head(self, source: _Source, tokens: int) -> None:
        model, space, shape = self.model, self.workspace, self._shape(self.tuning.head, tokens)
        facts, read = model.specification, source.activations
        self._launch(
            kernels.head_kernel,
            (model.head.shapes.padded_rows // ROWS,),
            model.head.parts,
            read.words,
            space.logits,
            space.best,
            space.best_ids,
            source.squares,
            source.norm.epsilon if source.norm else 0.0,
            facts.logit_scale,
            facts.logit_soft_cap,
            VOCABULARY=facts.vocabulary_size,
            BLOCKS=read.blocks,
            PLANES=read.planes,
            STEP=shape.step_for(read.blocks),
            TOKENS=tokens,
            TILE=model.head.shapes.tile,
            NORM=int(source.norm is not None),
            COUNT=source.squares.shape[1],
            WIDTH=facts.width,
            CAPPED=facts.logit_soft_cap != 0,
            warps=shape.warps_for(read.blocks),
        )
