"""Hands out a model's hidden states: after each step, to what reads them, such as a draft head."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from edgeinfer.errors import SettingError
from edgeinfer_kernels.backend import Backend, HiddenStates

OUTPUT_NORM = -1
"""As the number of layers: all of them and the output norm, the input of the head."""
ON_DEVICE = -2
"""As the only number of layers: those after the output norm, which stay on the GPU, for a draft head there.
No states are handed out then.
"""
RESUMED_TOKENS = 32
"""The last tokens of a pause, whose hidden states are handed out: the text that a draft after it has."""


class HiddenStep(NamedTuple):
    """The hidden states of one step of a model, valid until its next step.

    `ids`: the tokens of the step, at positions `start`… of the text; `text`: all tokens that the cache holds,
    with these at the end; it grows, so copy what you keep. `states`: for each requested number of layers the
    hidden states (len(ids), hidden size) after them, on the device that computed them; float32 arrays on the
    CPU.
    """

    start: int
    ids: Sequence[int]
    text: Sequence[int]
    states: Sequence[HiddenStates]

    def parts(self, size: int) -> list[tuple[Sequence[int], Sequence[HiddenStates]]]:
        """The tokens in parts of at most `size`, each with its states."""
        if len(self.ids) <= size:
            return [(self.ids, self.states)]
        parts = [slice(first, first + size) for first in range(0, len(self.ids), size)]
        return [(self.ids[part], [each[part] for each in self.states]) for part in parts]


HiddenObserver = Callable[[HiddenStep], None]


class HiddenTap:
    """Passes the hidden states of each step of one sequence to an observer.

    `layers`: after how many layers; 0 is the embedding, `OUTPUT_NORM` the input of the head.

    Raises:
        SettingError: the backend doesn't hand them out, or has no such layer.
    """

    def __init__(
        self, backend: Backend[Any], layers: Sequence[int], observer: HiddenObserver, count: int
    ) -> None:
        stays = tuple(layers) == (ON_DEVICE,) and backend.capabilities.kept_states > 0
        if not stays and not backend.capabilities.hands_out_hidden:
            raise SettingError(
                "draft: drafters that read hidden states run on the CPU only; take 'lookup' or a draft "
                "model, or device='cpu'"
            )
        self._layers = () if stays else tuple(layers)
        if wrong := [each for each in self._layers if not OUTPUT_NORM <= each <= count]:
            raise SettingError(
                f"draft: hidden states after {wrong[0]} layers, wanted {OUTPUT_NORM} to {count}"
            )
        self._backend, self._observer = backend, observer
        self.pause = 0
        """For how many tokens nothing reads the states."""
        backend.keep_hidden([count if each == OUTPUT_NORM else each for each in self._layers])

    def step(self, ids: Sequence[int], text: Sequence[int], rows: Sequence[int] | None = None) -> None:
        """Pass on the states of a step of `ids`, after which the cache holds `text`. `rows`: those of the
        step that these tokens had; None: they were all of it.

        In a long pause nothing is passed on but for its last tokens: it would take a tenth of the time of a
        small model's step.
        """
        if self.pause > RESUMED_TOKENS:
            return
        states = self._backend.kept_hidden(len(ids) if rows is None else 1 + max(rows))
        if rows is not None:
            states = [each[list(rows)] for each in states]
        if OUTPUT_NORM in self._layers:
            states = [
                self._backend.final_norm(each) if layers == OUTPUT_NORM else each
                for layers, each in zip(self._layers, states, strict=True)
            ]
        self._observer(HiddenStep(len(text) - len(ids), ids, text, states))
