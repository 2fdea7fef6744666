"""One launch method per kernel of a decode step; arguments come from the step's buffers."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from edgeinfer_kernels.blocks.feed_forward import Activation
from edgeinfer_kernels.cuda.decode.gemv_kernels import (
    gated_kernel,
    head_kernel,
    head_rows_kernel,
    residual_kernel,
    rows_kernel,
)
from edgeinfer_kernels.cuda.decode.step_norms import NextNorm, Source
from edgeinfer_kernels.cuda.decode.workspace import ROWS, Activations, Workspace
from edgeinfer_kernels.cuda.lora import adapted, embedding_args
from edgeinfer_kernels.cuda.tensor.logit_kernels import (
    LOGIT_COLUMNS,
    LOGIT_WARPS,
    best_of_ranks_kernel,
    gather_logits_kernel,
)
from edgeinfer_kernels.cuda.tensor.peer_columns import MAX_PEER_POLLS
from edgeinfer_kernels.cuda.tensor.peer_kernels import (
    SUM_COLUMNS,
    SUM_WARPS,
    sum_residual_kernel,
    sum_rows_kernel,
)
from edgeinfer_kernels.cuda.tensor.peer_memory import PeerInboxes
from edgeinfer_kernels.cuda.triton_ops.activations import activation_code
from edgeinfer_kernels.cuda.triton_ops.embedding_kernels import embed_kernel
from edgeinfer_kernels.cuda.triton_ops.kernel_args import (
    GatedConfig,
    GemvConfig,
    InboxArgs,
    NormArgs,
    NormConfig,
    SourceConfig,
    WordsConfig,
)
from edgeinfer_kernels.cuda.triton_ops.norm_kernels import activation_norm_kernel, add_norm_kernel
from edgeinfer_kernels.cuda.tuning.step_shapes import RowKernel, Tuning, next_power_of_two
from edgeinfer_kernels.cuda.weights.device_builder import Stack
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.plane_formats import BLOCK, Tile

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

    def _split(
        self, kernel: RowKernel, tokens: int, matrices: Sequence[DeviceMatrix], rows: int = 0
    ) -> Iterator[tuple[int, GemvConfig, dict[str, Any]]]:
        """The launches that multiply all tokens: the first token, tile config, constants and options."""
        shapes = [matrix.shapes for matrix in matrices]
        for first, count in self.tuning.token_parts(kernel, tokens, shapes):
            config, warps = self.tuning.gemv(kernel, count, shapes, rows)
            yield first, config, {"GEMV": config, "warps": warps}

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

    def activation_norm(
        self,
        activation: Activation,
        ffn: "DeviceFeedForward",
        norm: NextNorm,
        rows: Tensor,
        out: Activations,
        tokens: int,
    ) -> None:
        """The normalized hidden rows as activations, from the products of up and gate, side by side."""
        self.launch(
            activation_norm_kernel,
            (tokens,),
            rows,
            rows.stride(0),
            ffn.up.shapes.padded_rows,
            self.or_nothing(ffn.gate_bias),
            self.or_nothing(ffn.up_bias),
            ffn.gate_scale,
            ffn.up_scale,
            self.norm_args(norm),
            out.words,
            NORM=self.rows_config(ffn.neurons, norm),
            ACTIVATION=activation_code(activation),
            HAS_GATE=ffn.gate is not None,
            HAS_BIAS=ffn.up_bias is not None,
            OUT=out.config,
            warps=8,
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
        for first, config, options in self._split(kernel, tokens, (matrix,)):
            self.launch(
                residual_kernel,
                (matrix.shapes.padded_rows // (ROWS * config.groups),),
                self.parts(matrix, first),
                read.words[first:],
                self.workspace.x[first:],
                self.or_nothing(bias),
                scale,
                self.or_nothing(gain),
                out.words[first:],
                target.sum_squares[first:],
                WIDTH=self.model.spec.hidden_size,
                READ=read.config,
                OUT=out.config,
                TILE=self.tile(matrix),
                BIAS=bias is not None,
                GAIN=gain is not None,
                **options,
            )

    def add_norm(
        self,
        y: Tensor | None,
        post_norm: NextNorm | None,
        scale: float,
        norm: NextNorm,
        out: Activations,
        tokens: int,
        gain: float = 1.0,
    ) -> None:
        """x = gain·(x + scale·post_norm(y)), or gain·x without y; then its norm into `out`."""
        read = self.workspace.x if y is None else y
        has_post_norm = post_norm is not None and post_norm.weight is not None
        self.launch(
            add_norm_kernel,
            (tokens,),
            read,
            read.shape[1],
            self.workspace.x,
            scale,
            gain,
            self.norm_args(post_norm),
            self.norm_args(norm),
            out.words,
            NORM=self.norm_config(norm, adds=y is not None, has_post_norm=has_post_norm, scales=gain != 1),
            OUT=out.config,
            warps=8,
        )

    def sum_residual(
        self,
        peers: InboxArgs | None,
        y: Tensor,
        scale: float,
        gain: Tensor | None,
        target: Source,
        tokens: int,
    ) -> None:
        """x += scale·the sum of y over the ranks of tensor parallel, or y if there are no `peers`; and x·gain
        to the target.
        """
        out = target.activations
        self.launch(
            sum_residual_kernel,
            (-(-out.blocks * BLOCK // SUM_COLUMNS), tokens),
            peers,
            y,
            y.stride(0),
            self.workspace.x,
            scale,
            self.or_nothing(gain),
            out.words,
            target.sum_squares,
            WIDTH=self.model.spec.hidden_size,
            COLUMNS=SUM_COLUMNS,
            OUT=out.config,
            POLLS=MAX_PEER_POLLS,
            GAIN=gain is not None,
            warps=SUM_WARPS,
        )

    def sum_rows(self, peers: InboxArgs, y: Tensor, tokens: int) -> None:
        """y = its sum over the ranks of tensor parallel."""
        width = self.model.spec.hidden_size
        self.launch(
            sum_rows_kernel,
            (-(-width // SUM_COLUMNS), tokens),
            peers,
            y,
            y.stride(0),
            WIDTH=width,
            COLUMNS=SUM_COLUMNS,
            POLLS=MAX_PEER_POLLS,
            warps=SUM_WARPS,
        )

    def gather_logits(self, peers: PeerInboxes, tokens: int) -> None:
        """logits = those of all ranks of tensor parallel."""
        self.launch(
            gather_logits_kernel,
            (-(-peers.columns // LOGIT_COLUMNS), tokens),
            peers.args,
            self.workspace.own_logits,
            self.workspace.logits,
            self.first_rows,
            VOCABULARY=self.model.vocabulary,
            COLUMNS=LOGIT_COLUMNS,
            POLLS=MAX_PEER_POLLS,
            warps=LOGIT_WARPS,
        )

    def best_of_ranks(self, peers: PeerInboxes, sampled: Tensor, ring: int) -> None:
        """The id of the largest logit of all ranks, as `sample_best_kernel`."""
        space = self.workspace
        self.launch(
            best_of_ranks_kernel,
            (1,),
            peers.args,
            space.best,
            space.best_ids,
            self.first_rows,
            space.state,
            sampled,
            PROGRAMS=self.model.head.shapes.padded_rows // ROWS,
            RING=ring,
            POLLS=MAX_PEER_POLLS,
            warps=8,
        )

    @property
    def first_rows(self) -> tuple[int, ...]:
        """The first row of each rank's part of the head, and the end."""
        part = self.model.part
        assert part is not None, "only ranks of tensor parallel have parts"
        return (*(rows.start for rows in part.vocabulary), part.whole_vocabulary)

    def norm_args(self, norm: NextNorm | None) -> NormArgs:
        """The weights of a norm, if there is one."""
        if norm is None:
            return NormArgs(self.workspace.nothing, self.workspace.nothing, 0.0)
        return NormArgs(self.or_nothing(norm.weight), self.or_nothing(norm.bias), norm.spec.epsilon)

    def norm_config(
        self, norm: NextNorm, *, adds: bool, has_post_norm: bool = False, scales: bool = False
    ) -> NormConfig:
        """The configuration of a kernel that normalizes whole rows of x."""
        width = self.model.spec.hidden_size
        kinds = norm.weight is not None, norm.spec.kind == "layer", norm.bias is not None
        groups = next_power_of_two(-(-width // 16))
        return NormConfig(width, groups, adds, has_post_norm, *kinds, scales=scales)

    @staticmethod
    def rows_config(width: int, norm: NextNorm) -> NormConfig:
        """As `norm_config`, for rows of `width` columns and a norm without a bias."""
        groups, is_layer_norm = next_power_of_two(-(-width // 16)), norm.spec.kind == "layer"
        return NormConfig(width, groups, False, False, True, is_layer_norm, False)

    def quantize(
        self, values: Tensor, width: int, out: Activations, tokens: int, stride: int | None = None
    ) -> None:
        """Quantize rows of `width` floats, `stride` apart, to activations."""
        no_norm, groups = self.norm_args(None), next_power_of_two(-(-width // 16))
        self.launch(
            add_norm_kernel,
            (tokens,),
            values,
            width if stride is None else stride,
            self.workspace.nothing,
            0.0,
            1.0,
            no_norm,
            no_norm,
            out.words,
            NORM=NormConfig(width, groups, False, False, False, False, False),
            OUT=out.config,
            warps=4,
        )

    def normalize(self, rows: Tensor, width: int, norm: NextNorm, out: Activations, tokens: int) -> None:
        """The norm of the first `width` elements of rows, as activations."""
        self.launch(
            add_norm_kernel,
            (tokens,),
            rows,
            rows.stride(0),
            self.workspace.nothing,
            0.0,
            1.0,
            self.norm_args(None),
            self.norm_args(norm),
            out.words,
            NORM=self.rows_config(width, norm),
            OUT=out.config,
            warps=4,
        )

    def head(self, source: Source, tokens: int, begin: int = 0, rows: int = 0) -> None:
        """The logits of the tokens from `begin` on, and the argmax of every program's rows; 0: all `rows`."""
        model, space = self.model, self.workspace
        self._multiply_a((model.head,), source.activations, source.sum_squares, "head", tokens)
        out = space.own_logits, space.best, space.best_ids
        self.logits(model.head, source, *out, tokens, begin, rows)

    def logits(
        self,
        matrix: DeviceMatrix,
        source: Source,
        logits: Tensor,
        best: Tensor,
        best_ids: Tensor,
        tokens: int,
        begin: int = 0,
        rows: int = 0,
    ) -> None:
        """As `head`, with an output matrix, to rows of logits and of each program's argmax."""
        model, spec = self.model, self.model.spec
        for part, config, options in self._split("head", tokens - begin, (matrix,)):
            first = begin + part
            read = source.after(first)
            self.launch(
                head_kernel,
                ((rows or matrix.shapes.padded_rows) // (ROWS * config.groups),),
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
