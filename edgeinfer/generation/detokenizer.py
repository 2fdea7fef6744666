"""Incremental detokenizer: never emits part of a character or the start of a possible stop string."""

from collections.abc import Sequence
from dataclasses import replace

from edgeinfer.engine.protocols import TextTokenizer
from edgeinfer.generation.stop_strings import StopStrings
from edgeinfer.results import Token


class Detokenizer:
    """Adds text to tokens; buffers those whose text is incomplete (part of a character or stop string)."""

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str]) -> None:
        self._decoder = tokenizer.stream_decoder()
        self._stops = StopStrings(stop)
        self._waiting: list[Token] = []

    @property
    def stopped(self) -> bool:
        return self._stops.found is not None

    def push(self, token: Token) -> list[Token]:
        """The tokens that can be emitted now, with their text."""
        shown = self._stops.push(self._decoder.push(token.id))
        # `dataclasses.replace` would take three times as long, on the path between two steps.
        self._waiting.append(Token(token.id, shown, token.drafted, token.logprob, token.top_logprobs))
        certain = self.stopped or not (self._stops.holds or self._decoder.pending)
        return self._release() if certain else []

    def finish(self) -> list[Token]:
        """The buffered tokens, at the end of generation."""
        if not self.stopped:
            rest = self._stops.push(self._decoder.finish()) + self._stops.finish()
            if rest:
                self._waiting[-1] = replace(self._waiting[-1], text=self._waiting[-1].text + rest)
        return self._release()

    def _release(self) -> list[Token]:
        released, self._waiting = self._waiting, []
        return released
