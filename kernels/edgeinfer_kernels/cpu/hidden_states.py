"""The hidden states that a CPU backend keeps after chosen layers, and those that a draft head takes."""

from collections.abc import Iterator, Sequence

import numpy as np

from edgeinfer_kernels.backend import Activations
from edgeinfer_kernels.blocks.embedding.assistant_input import AssistantInputSpec
from edgeinfer_kernels.blocks.embedding.draft_input import HEAD_BATCH, STATES
from edgeinfer_kernels.blocks.embedding.eagle_input import OWN_STATES, EagleInputSpec
from edgeinfer_kernels.blocks.embedding.fused_states import FusedStatesSpec
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.caches.state_rows import RowAddresses
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.decoder import CpuDecoder
from edgeinfer_kernels.cpu.layout.packed_matrix import address, float_rows
from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE
from edgeinfer_kernels.cpu.runtime.embedding_args import AssistantInputArgs, DraftInputArgs, EagleInputArgs
from edgeinfer_kernels.decoder import BlockIndex
from edgeinfer_kernels.reference.backend import final_norm


class KeptStates:
    """Buffers for the hidden states after some numbers of layers, in steps of at most `batch` tokens.

    Those after all `count` layers are not copied: they are the rows that the layers have changed.
    """

    def __init__(self, width: int, layers: Sequence[int] = (), count: int = 0, batch: int = 0) -> None:
        self._width, self._layers, self._count = width, tuple(layers), count
        self.inner = sorted({each for each in layers if each < count})
        """The numbers of layers whose states are copied."""
        self._buffers = {each: np.empty((batch, width), np.float32) for each in self.inner}
        self._views = dict[int, list[Activations]]()
        """By the number of tokens: making a view takes as long as much of a small step's Python."""

    def keep(self, layer: int, x: Activations) -> None:
        """Copy the hidden states before a layer, if they are requested."""
        if layer in self._buffers:
            self._buffers[layer][: len(x)] = x

    def parts(self, x: Activations) -> Iterator[tuple[int, int]]:
        """The ranges of layers (first, end) between the copies, which are made as the ranges are taken."""
        first = 0
        for end in (*self.inner, self._count):
            if end > first:
                yield first, end
            self.keep(end, x)
            first = end

    def rows(self, x: Activations, tokens: int) -> list[Activations]:
        """The states of a step of some tokens, whose rows after the last layer are the first of x."""
        if tokens not in self._views:
            every = (self._buffers.get(each, x) for each in self._layers)
            self._views[tokens] = [rows[:tokens, : self._width] for rows in every]
        return self._views[tokens]


class NormedStates:
    """The states of a target after its final norm, for a draft head, by the compiled norm at the address
    `norm`: numpy takes as long as a draft token of a small head.
    """

    def __init__(self, kernels: Kernels, norm: int, width: int) -> None:
        self._norm, self._function = norm, kernels.function("norm_rows", 5)
        self._rows = np.empty((2 * HEAD_BATCH, width), np.float32)
        self._address, self._row_bytes = address(self._rows), self._rows.strides[0]
        self._views = [self._rows[:count] for count in range(len(self._rows) + 1)]
        self._sources = RowAddresses(width)

    def of(self, x: Activations, first: int, last: int) -> Activations | None:
        """The normed rows first..last of x, valid until the next call; None: they aren't whole vectors, or
        too many.
        """
        source, count = self._sources.of(x), last - first
        if source is None or self._row_bytes % CACHE_LINE or count >= len(self._views):
            return None
        self._function(self._norm, source + first * self._row_bytes, self._address, self._row_bytes, count)
        return self._views[count]


class TakenStates:
    """The buffers in which the decoder of a draft head takes hidden states, and the arguments of the block
    that reads them; made once, because views of addresses take as long as a small kernel. A head of MTP reads
    states of whole vectors where they are.
    """

    def __init__(self, decoder: CpuDecoder, batch: int) -> None:
        self._decoder, spec = decoder, decoder.spec
        self._args = None if spec.specs(FusedStatesSpec) else _input_args(decoder)
        has_own = spec.specs(AssistantInputSpec) or spec.specs(EagleInputSpec)
        names = (STATES, OWN_STATES) if has_own else (STATES,)
        buffers = {name: decoder.workspace.rows(name) for name in names}
        self._rows = {name: float_rows(at, batch, stride // 4) for name, (at, stride) in buffers.items()}
        self._address, stride = buffers[STATES]
        self._in_place: DraftInputArgs | None = None
        """The arguments of a head that reads normed states where they are."""
        is_whole = stride == 4 * spec.hidden_size and not spec.has_raw_draft_states
        if isinstance(self._args, DraftInputArgs) and is_whole:
            self._in_place = self._args
        self._sources = RowAddresses(spec.hidden_size)

    def take(self, states: Activations, start: int) -> None:
        """Take the target's hidden states for the next step, at `start`."""
        args = self._in_place
        source = self._sources.of(states) if args else None
        if args is None or source is None:
            self._copy(states, start)
        else:
            args.states, args.start = source, start

    def _copy(self, states: Activations, start: int) -> None:
        """Copy states for the next step, at `start`."""
        self._rows[STATES][: len(states), : states.shape[1]] = states
        if self._in_place:
            self._in_place.states = self._address
        if self._args is not None:  # the states of block drafters have no position
            self._args.start = start

    def take_own(self, x: Activations, start: int) -> None:
        """As `take`, with the head's own hidden states after its last layer: an assistant takes them normed,
        a head of EAGLE-3 as they are, both for no position; other heads take them like those of the target.
        """
        spec, weights = self._decoder.spec, self._decoder.weights
        is_raw = spec.specs(EagleInputSpec) or spec.has_raw_draft_states
        states = x if is_raw else final_norm(spec, weights, np.asarray(x)).astype(np.float32)
        if OWN_STATES not in self._rows:
            self._copy(states, start)
            return
        self._rows[OWN_STATES][: len(states), : states.shape[1]] = states
        if self._args is not None:
            self._args.start = -1


def own_state(decoder: CpuDecoder) -> tuple[int, int]:
    """The address and the elements of the row in which a head of EAGLE-3 takes its own state; 0, 0: another
    one, which takes the row that it has normed.
    """
    if not decoder.spec.specs(EagleInputSpec):
        return 0, 0
    return decoder.workspace.rows(OWN_STATES)[0], padded(decoder.spec.hidden_size)


def _input_args(decoder: CpuDecoder) -> DraftInputArgs | EagleInputArgs | AssistantInputArgs:
    """The arguments of the block that reads hidden states."""
    address = decoder.calls[BlockIndex(0, 0)][0].block
    if decoder.spec.specs(EagleInputSpec):
        return EagleInputArgs.from_address(address)
    if decoder.spec.specs(AssistantInputSpec):
        return AssistantInputArgs.from_address(address)
    return DraftInputArgs.from_address(address)
