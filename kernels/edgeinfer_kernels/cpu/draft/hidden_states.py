"""The hidden states that a CPU backend keeps after chosen layers, and those that a draft head takes."""

from collections.abc import Iterator, Sequence

import numpy as np

from edgeinfer_kernels.backend import Activations
from edgeinfer_kernels.blocks.embedding.assistant_input import AssistantInputSpec
from edgeinfer_kernels.blocks.embedding.draft_input import STATES
from edgeinfer_kernels.blocks.embedding.eagle_input import OWN_STATES, EagleInputSpec
from edgeinfer_kernels.blocks.embedding.fused_states import FusedStatesSpec
from edgeinfer_kernels.caches.layer_cache import LANES, padded
from edgeinfer_kernels.caches.state_rows import RowAddresses, StateRows
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.decoder import CpuDecoder
from edgeinfer_kernels.cpu.layout.packed_matrix import float_rows
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
        self._row_bytes, self._is_whole = 4 * width, width % LANES == 0
        self._addresses = RowAddresses(width)

    def write(self, x: Activations, out: StateRows) -> bool:
        """Write the normed rows of x; False: they or those of `out` aren't whole vectors in order."""
        source, target = self._addresses.of(x), self._addresses.of(out.array)
        if source is None or target is None or not self._is_whole:
            return False
        row_bytes = self._row_bytes
        self._function(self._norm, source, target + out.first * row_bytes, row_bytes, len(x))
        return True


class TakenStates:
    """The buffers in which the decoder of a draft head takes hidden states, and the arguments of the block
    that reads them; made once, because views of addresses take as long as a small kernel. A head of MTP reads
    whole vectors where they are.
    """

    def __init__(self, decoder: CpuDecoder, batch: int) -> None:
        self._decoder, spec = decoder, decoder.spec
        self._args = None if spec.specs(FusedStatesSpec) else _input_args(decoder)
        has_own = spec.specs(AssistantInputSpec) or spec.specs(EagleInputSpec)
        names = (STATES, OWN_STATES) if has_own else (STATES,)
        buffers = {name: decoder.workspace.rows(name) for name in names}
        self._rows = {name: float_rows(at, batch, stride // 4) for name, (at, stride) in buffers.items()}
        self._address, self._stride = buffers[STATES]
        is_whole = self._stride == 4 * spec.hidden_size
        self.in_place = self._args if isinstance(self._args, DraftInputArgs) and is_whole else None
        """The arguments of a block that reads states where they are; None: they are copied."""
        self._addresses = RowAddresses(spec.hidden_size)

    def take(self, states: Activations | StateRows, start: int) -> None:
        """Take the target's hidden states for the next step, at `start`."""
        args = self.in_place
        if args is not None and isinstance(states, StateRows):
            source = self.address_of(states)
            if source:
                args.states, args.start = source, start
                return
        self._copy(np.asarray(states), start)

    def address_of(self, states: StateRows) -> int:
        """The address of states that can be read in place; 0: they can't."""
        at = self._addresses.of(states.array)
        return 0 if at is None else at + states.first * self._stride

    def _copy(self, states: Activations, start: int) -> None:
        """Copy states for the next step, at `start`."""
        self._rows[STATES][: len(states), : states.shape[1]] = states
        if self.in_place is not None:
            self.in_place.states = self._address
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
