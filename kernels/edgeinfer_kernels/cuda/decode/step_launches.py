"""The launches of a decode step's kernels other than norms; arguments come from the step's buffers."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from edgeinfer_kernels.blocks.feed_forward import Activation
from edgeinfer_kernels.cuda.compile_target import HAS_HIP
from edgeinfer_kernels.cuda.decode.gemv_kernels import (
    gated_kernel,
    head_kernel,
    head_rows_kernel,
    residual_kernel,
    rows_kernel,
)
from edgeinfer_kernels.cuda.decode.step_norms import NormLaunches, Source
from edgeinfer_kernels.cuda.decode.workspace import ROWS, Activations, Workspace
from edgeinfer_kernels.cuda.lora import adapted, embedding_args
from edgeinfer_kernels.cuda.tensor.rank_launches import RankLaunches
from edgeinfer_kernels.cuda.triton_ops.activations import activation_code
from edgeinfer_kernels.cuda.triton_ops.embedding_kernels import embed_kernel
from edgeinfer_kernels.cuda.triton_ops.kernel_args import (
    GatedConfig,
    GemvConfig,
    InputArgs,
    RowSplitArgs,
    SourceConfig,
    WordsConfig,
)
from edgeinfer_kernels.cuda.tuning.step_shapes import RowKernel, Tuning
from edgeinfer_kernels.cuda.weights.device_builder import Stack
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.plane_formats import Tile

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
        self.norms = NormLaunches(self)
        self.ranks = RankLaunches(self)

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        *arguments: Any,
        warps: int,
        registers: int = 0,
        **constants: Any,
    ) -> Any:
        """Launch the kernel, with at most this number of `registers` for a thread if it isn't 0; return the
        compiled kernel, or None with the interpreter.
        """
        return self.run(kernel, grid, *arguments, **self.options(warps, registers), **constants)

    def run(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **keywords: Any) -> Any:
        """As `launch`, with all options of Triton."""
        return kernel[grid](*arguments, **keywords)

    def options(self, warps: int, registers: int = 0) -> dict[str, Any]:
        """The options of a launch."""
        launch_options: dict[str, Any] = {"launch_pdl": True} if self.dependent else {}
        if registers and not HAS_HIP:
            launch_options["maxnreg"] = registers
        return {"DEPENDENT": self.dependent, "num_warps": warps, **launch_options}

    def _split(
        self,
        kernel: RowKernel,
        tokens: int,
        matrices: Sequence[DeviceMatrix],
        rows: int = 0,
        splits: bool = False,
    ) -> Iterator[tuple[int, GemvConfig, dict[str, Any]]]:
        """The launches that multiply all tokens: the first token, tile config, constants and options.
        `splits`: several programs may share rows.
        """
        shapes = [matrix.shapes for matrix in matrices]
        for first, count in self.tuning.token_parts(kernel, tokens, shapes):
            config, options = self.tuning.gemv(kernel, count, shapes, rows, splits)
            yield first, config, {"GEMV": config, **options}

    def parts(self, matrix: DeviceMatrix, first: int = 0) -> tuple[Tensor, ...]:
        """A matrix as kernels take it, with its LoRA adapter for the tokens from `first` on."""
        lora = self.model.lora.get(id(matrix))
        return matrix.parts if lora is None else (*matrix.parts, lora.products[first:], lora.b)

    def tile(self, matrix: DeviceMatrix) -> Tile:
        """The tile of a matrix, with the rank of its LoRA adapter."""
        lora = self.model.lora.get(id(matrix))
        return matrix.shapes.tile if lora is None else lora.tile(matrix.shapes.tile)

    def _multiply_a(
        self,
        matrices: Sequence[DeviceMatrix],
        read: Activations,
        sum_squares: Tensor,
        kernel: RowKernel,
        tokens: int,
    ) -> None:
        """The products a·x of the LoRA adapters of some matrices, without a norm that remains to be applied:
        the kernel of the matrix applies it to the sums of both.
        """
        for lora in adapted(self.model.lora, matrices):
            self.rows((lora.a,), Source(read, sum_squares), lora.products, None, kernel, tokens)

    def or_nothing(self, tensor: Tensor | None) -> Tensor:
        return self.workspace.nothing if tensor is None else tensor

    def source_config(self, source: Source) -> SourceConfig:
        """The layout of the activations, and the norm that remains to be applied."""
        read, has_norm = source.activations, source.norm is not None
        count, width = source.sum_squares.shape[1], self.model.spec.hidden_size
        return SourceConfig(read.blocks, read.planes, int(has_norm), count, width)

    def embed(self, gain: Tensor | None, out: Activations, sum_squares: Tensor, tokens: int) -> None:
        """The embeddings of the ids in `state` to x, and x·gain as activations."""
        model, space = self.model, self.workspace
        parts, tile = embedding_args(model.embedding, model.embedding_lora)
        self.launch(
            embed_kernel,
            (-(-out.blocks // 8), tokens),
            parts,
            space.state,
            space.x,
            self.or_nothing(gain),
            out.words,
            sum_squares,
            model.spec.embedding_scale,
            WIDTH=model.spec.hidden_size,
            COUNT=sum_squares.shape[1],
            IN_BLOCKS=model.embedding.shapes.blocks,
            OUT=out.config,
            GAIN=gain is not None,
            TILE=tile,
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
        self._multiply_a(parts, source.activations, source.sum_squares, kernel, tokens)
        for first, config, options in self._split(kernel, tokens, parts):
            read, rows = source.after(first), ROWS * config.groups
            programs = [part.shapes.padded_rows // rows for part in parts]
            self.launch(
                rows_kernel,
                (sum(programs),),
                self.parts(parts[0], first),
                self.parts(parts[-1], first),
                read.activations.words,
                y[first:],
                self.or_nothing(bias),
                read.squares_args,
                y.stride(0),
                FIRST_PROGRAMS=programs[0],
                FIRST=self.tile(parts[0]),
                SECOND=self.tile(parts[1]) if len(parts) > 1 else None,
                BIAS=bias is not None,
                SOURCE=self.source_config(read),
                **options,
            )

    def stacked(self, stack: Stack, source: Source, y: Tensor, bias: Tensor | None, tokens: int) -> None:
        """Every matrix of a stack times activations, side by side, to y; up to two formats per launch."""
        first_row = 0
        for index in range(0, len(stack.parts), 2):
            pair = stack.parts[index : index + 2]
            own_bias = None if bias is None else bias[first_row:]
            self.rows(pair, source, y[:, first_row:], own_bias, "qkv", tokens)
            first_row += sum(part.shapes.padded_rows for part in pair)

    def head_rows(
        self, matrix: DeviceMatrix, heads: int, read: Activations, out: Activations | Tensor, tokens: int
    ) -> None:
        """Each head's rows of a matrix times its row of activations, to floats or as activations."""
        floats, head_rows = isinstance(out, Tensor), matrix.shapes.rows // heads
        y, layout = (out, WordsConfig(0, 0)) if isinstance(out, Tensor) else (out.words, out.config)
        for first, config, options in self._split("qkv", tokens, (matrix,), head_rows):
            self.launch(
                head_rows_kernel,
                (matrix.shapes.padded_rows // (ROWS * config.groups),),
                matrix.parts,
                read.words[heads * first :],
                y[first:],
                y.stride(0) if floats else 0,
                HEAD_ROWS=head_rows,
                HEADS=heads,
                READ=read.config,
                OUT=layout,
                TILE=matrix.shapes.tile,
                **options,
            )

    def gated(
        self, activation: Activation, ffn: "DeviceFeedForward", source: Source, out: Activations, tokens: int
    ) -> None:
        """Gate and up to the hidden rows, as activations."""
        gate, code = ffn.gate or ffn.up, activation_code(activation)
        has_gate, has_bias = ffn.gate is not None, ffn.up_bias is not None
        gated = GatedConfig(self.tile(gate), self.tile(ffn.up), has_gate, has_bias, code)
        matrices = (gate, ffn.up) if has_gate else (ffn.up,)
        self._multiply_a(matrices, source.activations, source.sum_squares, "gated", tokens)
        for first, config, options in self._split("gated", tokens, (gate, ffn.up)):
            read = source.after(first)
            self.launch(
                gated_kernel,
                (ffn.up.shapes.padded_rows // (ROWS * config.groups),),
                self.parts(gate, first),
                self.parts(ffn.up, first),
                read.activations.words,
                out.words[first:],
                self.or_nothing(ffn.gate_bias),
                self.or_nothing(ffn.up_bias),
                read.squares_args,
                HIDDEN=out.config,
                GATED=gated,
                SOURCE=self.source_config(read),
                **options,
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
        self._multiply_a((matrix,), read, target.sum_squares, kernel, tokens)
        splits = id(matrix) not in self.model.lora
        for first, config, options in self._split(kernel, tokens, (matrix,), splits=splits):
            self.launch(
                residual_kernel,
                (matrix.shapes.padded_rows // (ROWS * config.groups), config.splits),
                self.parts(matrix, first),
                read.words[first:],
                self.workspace.x[first:],
                self.or_nothing(bias),
                scale,
                InputArgs(out.words[first:], self.or_nothing(gain), target.sum_squares[first:]),
                RowSplitArgs(self.workspace.y, self.workspace.arrived),
                WIDTH=self.model.spec.hidden_size,
                READ=read.config,
                OUT=out.config,
                TILE=self.tile(matrix),
                BIAS=bias is not None,
                GAIN=gain is not None,
                **options,
            )

    def head(self, source: Source, tokens: int, begin: int = 0) -> None:
        """The logits of the tokens from `begin` on, and the argmax of every program's rows."""
        model, space = self.model, self.workspace
        self._multiply_a((model.head,), source.activations, source.sum_squares, "head", tokens)
        out = space.own_logits, space.best, space.best_ids
        self.logits(model.head, source, *out, tokens, begin)

    def logits(
        self,
        matrix: DeviceMatrix,
        source: Source,
        logits: Tensor,
        best: Tensor,
        best_ids: Tensor,
        tokens: int,
        begin: int = 0,
    ) -> None:
        """As `head`, with an output matrix, to rows of logits and of each program's argmax."""
        model, spec = self.model, self.model.spec
        for part, config, options in self._split("head", tokens - begin, (matrix,)):
            first = begin + part
            read = source.after(first)
            self.launch(
                head_kernel,
                (matrix.shapes.padded_rows // (ROWS * config.groups),),
                self.parts(matrix, first),
                read.activations.words,
                logits[first:],
                best[first:],
                best_ids[first:],
                self.or_nothing(model.head_bias),
                read.squares_args,
                spec.logit_scale,
                spec.logit_soft_cap,
                VOCABULARY=spec.vocabulary_size,
                TILE=self.tile(matrix),
                CAPPED=spec.logit_soft_cap != 0,
                BIAS=model.head_bias is not None,
                SOURCE=self.source_config(read),
                **options,
            )
