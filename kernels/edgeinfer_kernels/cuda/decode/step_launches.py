"""One launch method per kernel of a decode step; arguments come from the step's buffers."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from edgeinfer_kernels.blocks.feed_forward import Activation
from edgeinfer_kernels.cuda.decode.gemv_kernels import gated_kernel, head_kernel, residual_kernel, rows_kernel
from edgeinfer_kernels.cuda.decode.step_norms import NextNorm, Source
from edgeinfer_kernels.cuda.decode.workspace import ROWS, Activations, Workspace
from edgeinfer_kernels.cuda.triton_ops.activations import ACTIVATIONS
from edgeinfer_kernels.cuda.triton_ops.embedding_kernels import embed_kernel
from edgeinfer_kernels.cuda.triton_ops.norm_kernels import join_kernel
from edgeinfer_kernels.cuda.tuning.step_shapes import RowKernel, Tuning, next_power_of_two
from edgeinfer_kernels.cuda.weights.device_builder import Stack
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.blocks.feed_forward import DeviceFeedForward
    from edgeinfer_kernels.cuda.weights.device_model import DeviceModel


class StepLaunches:
    """Launches kernels on the current stream; `dependent`: with programmatic dependent launch."""

    def __init__(
        self,
        model: "DeviceModel",
        workspace: Workspace,
        tuning: Tuning,
        *,
        dependent: bool,
    ) -> None:
        self.model = model
        self.workspace = workspace
        self.tuning = tuning
        self.dependent = dependent

    def launch(
        self, kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, **constants: Any
    ) -> Any:
        """Launch the kernel; return the compiled kernel, or None with the interpreter."""
        return kernel[grid](*arguments, **self.options(warps), **constants)

    def options(self, warps: int) -> dict[str, Any]:
        """The options that all launches share."""
        launch_options: dict[str, Any] = {"launch_pdl": True} if self.dependent else {}
        return {"DEPENDENT": self.dependent, "num_warps": warps, **launch_options}

    def _cut(self, kernel: RowKernel, blocks: int, tokens: int) -> dict[str, int]:
        """The tile config of a GEMV kernel: its constants STEP, VECTOR and TOKENS, and its warps."""
        shape = self.tuning.shape(kernel, tokens)
        step = shape.step_for(blocks)
        cut = {"STEP": step, "VECTOR": min(shape.vector, step), "TOKENS": tokens}
        return {**cut, "warps": shape.warps_for(blocks)}

    def or_nothing(self, tensor: Tensor | None) -> Tensor:
        return self.workspace.nothing if tensor is None else tensor

    def of_source(self, source: Source) -> dict[str, Any]:
        """The constants for the layout of the activations and the norm that remains to be applied."""
        return {
            "BLOCKS": source.activations.blocks,
            "PLANES": source.activations.planes,
            "NORM": int(source.norm is not None),
            "COUNT": source.squares.shape[1],
            "WIDTH": self.model.spec.hidden_size,
        }

    def embed(self, gain: Tensor | None, out: Activations, squares: Tensor, tokens: int) -> None:
        """The embeddings of the ids in `state` to x, and x·gain as activations."""
        model, space = self.model, self.workspace
        self.launch(
            embed_kernel,
            (-(-out.blocks // 8), tokens),
            model.embedding.parts,
            space.state,
            space.x,
            self.or_nothing(gain),
            out.words,
            squares,
            model.spec.embedding_scale,
            WIDTH=model.spec.hidden_size,
            COUNT=squares.shape[1],
            BLOCKS=out.blocks,
            IN_BLOCKS=model.embedding.shapes.blocks,
            PLANES=out.planes,
            GAIN=gain is not None,
            TILE=model.embedding.shapes.tile,
            warps=1,
        )

    def rows(
        self,
        parts: tuple[DeviceMatrix, ...],
        source: Source,
        y: Tensor,
        bias: Tensor | None,
        kernel: RowKernel,
        tokens: int,
    ) -> None:
        """One or two matrices times activations, stacked, to y."""
        programs = [part.shapes.padded_rows // ROWS for part in parts]
        self.launch(
            rows_kernel,
            (sum(programs),),
            parts[0].parts,
            parts[-1].parts,
            source.activations.words,
            y,
            self.or_nothing(bias),
            source.squares,
            source.norm.epsilon if source.norm else 0.0,
            y.stride(0),
            FIRST_PROGRAMS=programs[0],
            FIRST=parts[0].shapes.tile,
            SECOND=parts[-1].shapes.tile,
            BIAS=bias is not None,
            **self.of_source(source),
            **self._cut(kernel, source.activations.blocks, tokens),
        )

    def stacked(self, stack: Stack, source: Source, y: Tensor, bias: Tensor | None, tokens: int) -> None:
        """Every matrix of a stack times activations, side by side, to y; up to two formats per launch."""
        first_row = 0
        for index in range(0, len(stack.parts), 2):
            pair = stack.parts[index : index + 2]
            own_bias = None if bias is None else bias[first_row:]
            self.rows(pair, source, y[:, first_row:], own_bias, "qkv", tokens)
            first_row += sum(part.shapes.padded_rows for part in pair)

    def gated(
        self, activation: Activation, ffn: "DeviceFeedForward", source: Source, out: Activations, tokens: int
    ) -> None:
        """Gate and up to the hidden rows, as activations."""
        gate = ffn.gate or ffn.up
        self.launch(
            gated_kernel,
            (ffn.up.shapes.padded_rows // ROWS,),
            gate.parts,
            ffn.up.parts,
            source.activations.words,
            out.words,
            self.or_nothing(ffn.gate_bias),
            self.or_nothing(ffn.up_bias),
            source.squares,
            source.norm.epsilon if source.norm else 0.0,
            HIDDEN_BLOCKS=out.blocks,
            HIDDEN_PLANES=out.planes,
            GATE=gate.shapes.tile,
            UP=ffn.up.shapes.tile,
            GATED=ffn.gate is not None,
            BIAS=ffn.up_bias is not None,
            ACTIVATION=ACTIVATIONS[activation],
            **self.of_source(source),
            **self._cut("gated", source.activations.blocks, tokens),
        )

    def residual(
        self,
        matrix: DeviceMatrix,
        bias: Tensor | None,
        read: Activations,
        scale: float,
        gain: Tensor | None,
        target: Source,
        kernel: RowKernel,
        tokens: int,
    ) -> None:
        """x += scale·(matrix times activations + bias), and x·gain to the target."""
        out = target.activations
        self.launch(
            residual_kernel,
            (matrix.shapes.padded_rows // ROWS,),
            matrix.parts,
            read.words,
            self.workspace.x,
            self.or_nothing(bias),
            scale,
            self.or_nothing(gain),
            out.words,
            target.squares,
            WIDTH=self.model.spec.hidden_size,
            BLOCKS=read.blocks,
            PLANES=read.planes,
            OUT_BLOCKS=out.blocks,
            OUT_PLANES=out.planes,
            TILE=matrix.shapes.tile,
            BIAS=bias is not None,
            GAIN=gain is not None,
            **self._cut(kernel, read.blocks, tokens),
        )

    def join(
        self,
        y: Tensor | None,
        post_norm: NextNorm | None,
        scale: float,
        norm: NextNorm,
        out: Activations,
        tokens: int,
    ) -> None:
        """x += scale·post_norm(y), or x unchanged without y; then its norm into `out`."""
        space, width = self.workspace, self.model.spec.hidden_size
        read = space.x if y is None else y
        post = post_norm.weight if post_norm else None
        self.launch(
            join_kernel,
            (tokens,),
            read,
            read.shape[1],
            space.x,
            scale,
            self.or_nothing(post),
            post_norm.facts.epsilon if post_norm else 0.0,
            self.or_nothing(norm.weight),
            self.or_nothing(norm.bias),
            norm.facts.epsilon,
            out.words,
            WIDTH=width,
            GROUPS=next_power_of_two(-(-width // 16)),
            BLOCKS=out.blocks,
            PLANES=out.planes,
            ADDS=y is not None,
            POST=post is not None,
            NORM=norm.weight is not None,
            LAYER=norm.facts.kind == "layer",
            BIAS=norm.bias is not None,
            warps=8,
        )

    def quantize(self, values: Tensor, width: int, out: Activations, tokens: int) -> None:
        """Quantize rows of floats to activations."""
        nothing = self.workspace.nothing
        self.launch(
            join_kernel,
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

    def head(self, source: Source, tokens: int) -> None:
        """The logits, and the argmax of every program's rows."""
        model, space = self.model, self.workspace
        facts = model.spec
        self.launch(
            head_kernel,
            (model.head.shapes.padded_rows // ROWS,),
            model.head.parts,
            source.activations.words,
            space.logits,
            space.best,
            space.best_ids,
            source.squares,
            source.norm.epsilon if source.norm else 0.0,
            facts.logit_scale,
            facts.logit_soft_cap,
            VOCABULARY=facts.vocabulary_size,
            TILE=model.head.shapes.tile,
            CAPPED=facts.logit_soft_cap != 0,
            **self.of_source(source),
            **self._cut("head", source.activations.blocks, tokens),
        )
