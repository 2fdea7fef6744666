"""The generation loop: advances all live sequences by one engine step. One sequence is the special case."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from edgeinfer.generation.sampled_token import SampledToken
from edgeinfer.generation.sequence import GenerationSequence
from edgeinfer.generation.timer import GenerationTimer
from edgeinfer.results import Token


class Decode(Protocol):
    """How an engine step is made; chosen at the start of a request."""

    def step(self, sequences: Sequence[GenerationSequence]) -> list[list[SampledToken]]:
        """One engine step: the next tokens of each sequence, which its sampler has accepted; none for a
        sequence that has to wait.
        """
        ...


class GenerationLoop:
    """The sequences of one request, and how they are decoded."""

    def __init__(
        self, sequences: Sequence[GenerationSequence], decode: Decode, timer: GenerationTimer
    ) -> None:
        self.live = list(sequences)
        self._decode = decode
        self._timer = timer

    def step(self) -> Iterator[tuple[GenerationSequence, Token]]:
        """One engine step; yields the tokens that can be emitted. `live` are the sequences that go on."""
        self._timer.resume()
        found = self._decode.step(self.live)
        self._timer.decoded(sum(map(len, found)))
        yield from self.append(found)

    def append(self, found: Sequence[Sequence[SampledToken]]) -> Iterator[tuple[GenerationSequence, Token]]:
        """Append sampled tokens to the live sequences; yields the tokens that can be emitted."""
        for sequence, sampled in zip(self.live, found, strict=True):
            for index, token in enumerate(sampled):
                for emitted in sequence.append(token, index + 1 == len(sampled)):
                    yield sequence, emitted
                if sequence.reason is not None:
                    break
            if sequence.reason is not None:
                for emitted in sequence.finish():
                    yield sequence, emitted
        self.live = [sequence for sequence in self.live if sequence.reason is None]
