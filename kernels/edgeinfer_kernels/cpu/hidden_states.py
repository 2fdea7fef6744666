"""The hidden states that a CPU backend keeps after chosen layers, and those that a draft head takes."""

from collections.abc import Iterator, Sequence

import numpy as np

from edgeinfer_kernels.backend import Activations
from edgeinfer_kernels.blocks.embedding.assistant_input import AssistantInputSpec
from edgeinfer_kernels.blocks.embedding.draft_input import HEAD_BATCH, STATES
from edgeinfer_kernels.blocks.embedding.eagle_input import OWN_STATES, EagleInputSpec
from edgeinfer_kernels.blocks.embedding.fused_states import FusedStatesSpec
from edgeinfer_kernels.caches.layer_cache import LANES, padded
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.decoder import CpuDecoder
from edgeinfer_kernels.cpu.layout.packed_matrix import address, float_rows
from edgeinfer_kernels.cpu.runtime.embedding_args import AssistantInputArgs, DraftInputArgs, EagleInputArgs
from edgeinfer_kernels.cpu.runtime.schedule import quick_address
from edgeinfer_kernels.decoder import BlockIndex
from edgeinfer_kernels.reference.backend import final_norm


class KeptStates:
    """Buffers for the hidden states after some numbers of layers. `shape`: (tokens, hidden size) of a step.

    Those after all `count` layers are not copied: they are the rows that the layers have changed.
    """

    def __init__(self, layers: Sequence[int] = (), count: int = 0, shape: tuple[int, int] = (0, 0)) -> None:
        self._layers, self._count = tuple(layers), count
        self.inner = sorted({each for each in layers if each < count})
        """The numbers of layers whose states are copied."""
        self._buffers = {each: np.empty(shape, np.float32) for each in self.inner}

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

    def rows(self, x: Activations) -> list[Activations]:
        """The states of a step whose rows after the last layer are x."""
        return [self._buffers[each][: len(x)] if each in self._buffers else x for each in self._layers]


class NormedStates:
    """The states of a target after its final norm, for a draft head, by the compiled norm at the address
    `norm`: numpy takes as long as a draft token of a small head.
    """

    def __init__(self, kernels: Kernels, norm: int, width: int) -> None:
        self._norm, self._function = norm, kernels.function("norm_rows", 5)
        self._rows = np.empty((2 * HEAD_BATCH, width), np.float32)
        self._address = address(self._rows)

    def of(self, x: Activations) -> Activations | None:
        """The normed rows of x, valid until the next call; None: they aren't whole vectors, or too many."""
        width = self._rows.shape[1]
        if width % LANES or x.shape[1] != width or len(x) > len(self._rows) or not x.flags.c_contiguous:
            return None
        self._function(self._norm, quick_address(x), self._address, x.strides[0], len(x))
        return self._rows[: len(x)]


class TakenStates:
    """The buffers in which the decoder of a draft head takes hidden states, and the arguments of the block
    that reads them; made once, because views of addresses take as long as a small kernel.
    """

    def __init__(self, decoder: CpuDecoder, batch: int) -> None:
        self._decoder, spec = decoder, decoder.spec
        self._args = None if spec.specs(FusedStatesSpec) else _input_args(decoder)
        has_own = spec.specs(AssistantInputSpec) or spec.specs(EagleInputSpec)
        names = (STATES, OWN_STATES) if has_own else (STATES,)
        buffers = {name: decoder.workspace.rows(name) for name in names}
        self._rows = {name: float_rows(at, batch, stride // 4) for name, (at, stride) in buffers.items()}

    def take(self, states: Activations, start: int) -> None:
        """Copy the target's hidden states for the next step, at `start`."""
        self._rows[STATES][: len(states), : states.shape[1]] = states
        self._start_at(start)

    def take_own(self, x: Activations, start: int) -> None:
        """As `take`, with the head's own hidden states after its last layer: an assistant takes them normed,
        a head of EAGLE-3 as they are, both for no position; other heads take them like those of the target.
        """
        spec, weights = self._decoder.spec, self._decoder.weights
        is_raw = spec.specs(EagleInputSpec) or spec.has_raw_draft_states
        states = x if is_raw else final_norm(spec, weights, np.asarray(x)).astype(np.float32)
        if OWN_STATES not in self._rows:
            self.take(states, start)
            return
        self._rows[OWN_STATES][: len(states), : states.shape[1]] = states
        self._start_at(-1)

    def _start_at(self, start: int) -> None:
        if self._args is not None:  # the states of block drafters have no position
            self._args.start = start


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
