"""The kernel launches of one decode step: 1 to 16 tokens from ids to logits, entirely on the device.

    embed | for each block: its projections and its result, added to x | head | states for a draft head

The kernel that adds a block's result to x also applies the norm of the next block. If the block has a
post-norm, or the next norm is a layer norm, `add_norm_kernel` follows. A block that shares the input of the
one before it reads the same buffers, or one with its own norm of the same x; no norm is applied
between them. In a split model, x is sent to the
host at its CPU stages and is received with the CPU's sum added (`cpu_stages.py`). With tensor parallel the
results of blocks are partial sums: a kernel adds them up over the ranks and adds the sum to x, and the ranks'
logits are gathered.
"""

from dataclasses import replace
from itertools import accumulate
from typing import Any

from torch import Tensor

from edgeinfer_kernels.cuda.blocks import device_module, normalizes_input
from edgeinfer_kernels.cuda.cache.layout import BATCH, TEXT, Layout
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.decode.step_norms import NextNorm, Source
from edgeinfer_kernels.cuda.decode.workspace import Activations, Workspace
from edgeinfer_kernels.cuda.draft.states.keeping import keep_step
from edgeinfer_kernels.cuda.offload.cpu_stages import DecodeExchange
from edgeinfer_kernels.cuda.tensor.collective import Collective
from edgeinfer_kernels.cuda.tuning.step_shapes import RowKernel, Tuning
from edgeinfer_kernels.cuda.weights.device_model import DeviceModel
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix


class DecodeStep:
    """The kernels of a step, launched in order on the current stream.

    `exchange`: the CPU stages of a split model, whose step starts with hidden states from the host.
    `collective`: of a rank of tensor parallel.
    """

    def __init__(
        self,
        launches: StepLaunches,
        exchange: DecodeExchange | None = None,
        collective: Collective | None = None,
    ) -> None:
        self.launches = launches
        self.exchange = exchange
        self.collective = collective
        self.layout: Layout = TEXT
        self.gathers_logits = True
        """Whether each rank needs the logits of all."""
        self.is_tree = False
        """Whether the tokens of a step are a draft tree, for blocks with recurrent states."""
        blocks = launches.model.blocks
        self._modules = [device_module(block.residual.block.kind) for block in blocks]
        reads_anew = (not block.residual.shares_input for block in blocks)
        self._inputs = [0, *accumulate(reads_anew)]
        """Inputs that the first n blocks read, for n from 0 on."""
        self._before_layer = {
            number: [
                (self._modules[other].before_layer_decode, blocks[other])
                for other in range(len(blocks))
                if blocks[other].index.layer == block.index.layer
                and hasattr(self._modules[other], "before_layer_decode")
            ]
            for number, block in enumerate(blocks)
            if block.index.position == 0
        }

    @property
    def model(self) -> DeviceModel:
        return self.launches.model

    @property
    def workspace(self) -> Workspace:
        return self.launches.workspace

    @property
    def pages(self) -> Tensor | None:
        """The pages of the sequences of a step with this layout."""
        return None if self.layout == TEXT else self.workspace.pages

    def space(self, kind: str) -> Any:
        """The buffers of a block kind."""
        return self.workspace.spaces[kind]

    @property
    def is_batch(self) -> bool:
        """Whether each token belongs to another sequence."""
        return self.layout == BATCH

    def by_sequence(self, tokens: int) -> tuple[int, int]:
        """Tokens of each sequence of a step, and its number of sequences."""
        return (1, tokens) if self.is_batch else (tokens, 1)

    @property
    def tuning(self) -> Tuning:
        """The tile configs of the kernels; captured graphs keep their previous configs."""
        return self.launches.tuning

    @tuning.setter
    def tuning(self, tuning: Tuning) -> None:
        self.launches.tuning = tuning

    def launch(self, tokens: int, *, first_logits: int = 0) -> None:
        """From `state` to `logits`; the state of the blocks is updated. The tokens from `first_logits` on
        have logits.
        """
        source = self.receive(1, None, 0.0, -1, tokens) if self.exchange else self.embed(tokens)
        stages = self.exchange.stages if self.exchange else None
        block_input = own_input = source
        kept = None if self.is_batch else self.workspace.kept
        for number, (block, module) in enumerate(zip(self.model.blocks, self._modules, strict=True)):
            if kept is not None and block.index.position == 0:
                keep_step(self.launches, kept, self.model.layers[block.index.layer], tokens)
            for run, other in self._before_layer.get(number, ()):
                run(self, other, tokens)
            parallel = stages.parallel[number] if stages else 0
            block_input = block_input if block.residual.shares_input else source
            own_input = self._own_input(number + 1, tokens) or own_input
            read = own_input if block.residual.has_own_norm else block_input
            source = module.decode(self, number, block, read, tokens, parallel)
            if stages and stages.after[number]:
                self.send(stages.after[number], tokens)
                source = self.receive(stages.after[number], None, 0.0, number, tokens)
        if first_logits < tokens:
            self._head(source, tokens, first_logits)
        if kept is not None:
            keep_step(self.launches, kept, self.model.layer_count, tokens)

    def _own_input(self, number: int, tokens: int) -> Source | None:
        """The input of block `number`, if it shares x with the block before it, but not the norm."""
        out, blocks = self.workspace.own_input, self.model.blocks
        if out is None or number == len(blocks) or not blocks[number].residual.has_own_norm:
            return None
        norms = blocks[number].norms
        norm = NextNorm(blocks[number].residual.norm, norms.norm, norms.norm_bias)
        self.launches.norms.add_norm(None, None, 0.0, norm, out, tokens)
        return Source(out, self.workspace.sum_squares[0])

    def send(
        self, stage: int, tokens: int, routing: Any = None, experts_per_token: int = 0, slots: Any = None
    ) -> None:
        """Send x to the host for a stage; for an MoE block also the selected experts."""
        assert self.exchange is not None
        self.exchange.send(self.launches, stage, tokens, routing, experts_per_token, slots)

    def receive(self, stage: int, y: Tensor | None, scale: float, number: int, tokens: int) -> Source:
        """Set x to the host's hidden states plus scale·y, and apply the norm after block `number`."""
        return self._receive(stage, y, scale, number, tokens, None)

    def receive_part(self, stage: int, y: Tensor | None, scale: float, number: int, tokens: int) -> Source:
        """As `receive`; if block `number` has a post-norm, the host sends its part of the block's sum."""
        block = self.model.blocks[number]
        post = NextNorm.of_result(block.residual, block.norms)
        return self._receive(stage, y, scale, number, tokens, post if post.weight is not None else None)

    def receive_sum(self, stage: int, y: Tensor, tokens: int) -> None:
        """y += the host's part of a block's sum."""
        assert self.exchange is not None
        self.exchange.receive_sum(self.launches, stage, y, tokens)

    def _receive(
        self, stage: int, y: Tensor | None, scale: float, number: int, tokens: int, post: NextNorm | None
    ) -> Source:
        assert self.exchange is not None
        target, norm = self.target(number), self.norm_after(number)
        self.exchange.receive(self.launches, stage, y, scale, norm, target.activations, tokens, post)
        return target

    def add(self, number: int, y: Tensor | None, scale: float, tokens: int) -> Source:
        """x += scale·y, with the post-norm of block `number` if it has one, and apply the norm after it."""
        target, norm, post = self.target(number), self.norm_after(number), None
        if y is not None:
            block = self.model.blocks[number]
            post = NextNorm.of_result(block.residual, block.norms)
            if self.collective is not None:
                return self._add_sum(self.collective, y, post, scale, target, norm, tokens)
        self.launches.norms.add_norm(y, post, scale, norm, target.activations, tokens)
        return target

    def _add_sum(
        self,
        collective: Collective,
        y: Tensor,
        post: NextNorm,
        scale: float,
        target: Source,
        norm: NextNorm,
        tokens: int,
    ) -> Source:
        """`add` of the sum of y over the ranks of tensor parallel; as in `close_block`, the next kernel
        applies the norm if it can.
        """
        peers = None if collective.peers is None else collective.peers.args
        if peers is None:
            y = collective.sum_of_step(y[:tokens])
        if post.weight is None and norm.folds:
            self.launches.ranks.sum_residual(peers, y, scale, norm.weight, target, tokens)
            return replace(target, norm=norm.spec if norm.weight is not None else None)
        if peers is not None:
            self.launches.ranks.sum_rows(peers, y, tokens)
        self.launches.norms.add_norm(y, post, scale, norm, target.activations, tokens)
        return target

    def close_block(
        self,
        number: int,
        matrix: DeviceMatrix,
        bias: Tensor | None,
        read: Activations,
        kernel: RowKernel,
        tokens: int,
    ) -> Source:
        """x += the result of block `number`, `matrix` times `read`; also apply the next norm, as far as this
        kernel can.
        """
        block, target, norm = self.model.blocks[number], self.target(number), self.norm_after(number)
        post, scale = NextNorm.of_result(block.residual, block.norms), block.residual.residual_scale
        if post.weight is not None or not norm.folds or self.collective is not None:
            y = self.workspace.y
            self.launches.rows((matrix,), Source(read, target.sum_squares), y, bias, kernel, tokens)
            return self.add(number, y, scale, tokens)
        self.launches.residual(matrix, bias, read, scale, norm.weight, target, kernel, tokens)
        if norm.weight is not None:
            target.norm = norm.spec
        return target

    def target(self, number: int) -> Source:
        """The input buffers of the block after `number`: two pairs in turn. That of blocks that share an
        input isn't the target of any of them.
        """
        space, buffer = self.workspace, self._inputs[number + 1] % 2
        return Source(space.normed_input[buffer], space.sum_squares[buffer])

    def norm_after(self, number: int) -> NextNorm:
        """The norm after a block: that of the next block, or of the head."""
        model = self.model
        if number + 1 == len(model.blocks):
            return NextNorm(model.spec.norm, model.norm, model.norm_bias)
        block = model.blocks[number + 1]
        if block.residual.shares_input or normalizes_input(block.residual.block.kind):
            return NextNorm(block.residual.norm, None, None)
        return NextNorm(block.residual.norm, block.norms.norm, block.norms.norm_bias)

    def embed(self, tokens: int, number: int = -1) -> Source:
        """The embeddings of a step's tokens, as the input of the block after `number`."""
        target, norm = self.target(number), self.norm_after(number)
        if getattr(self._modules[0], "EMBEDS", False):
            return target
        out, sum_squares = target.activations, target.sum_squares
        self.launches.embed(norm.weight if norm.folds else None, out, sum_squares, tokens)
        if norm.folds:
            return Source(out, sum_squares, norm.spec if norm.weight is not None else None)
        self.launches.norms.add_norm(None, None, 0.0, norm, out, tokens)
        return target

    def head_of(self, tokens: int) -> None:
        """Compute the logits of hidden states that are already in the workspace's x."""
        out, model = self.workspace.normed_input[0], self.model
        norm = NextNorm(model.spec.norm, model.norm, model.norm_bias)
        self.launches.norms.add_norm(None, None, 0.0, norm, out, tokens)
        self._head(Source(out, self.workspace.sum_squares[0]), tokens, 0)

    def _head(self, source: Source, tokens: int, begin: int) -> None:
        """The logits of the tokens from `begin` on; those of all ranks."""
        self.launches.head(source, tokens, begin)
        if self.collective is None or not self.gathers_logits:
            return
        if self.collective.logit_peers is None:
            self.workspace.gather_logits(self.collective, tokens)
        else:
            self.launches.ranks.gather_logits(self.collective.logit_peers, tokens)
