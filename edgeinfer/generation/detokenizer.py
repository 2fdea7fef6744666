"""Text of tokens as soon as it is certain: never half a character, never the beginning of a stop string."""

from collections.abc import Sequence
from dataclasses import replace

from edgeinfer.engine.protocols import TextTokenizer
from edgeinfer.generation.stop_strings import StopStrings
from edgeinfer.results import Token


class Detokenizer:
    """Gives tokens their text; holds those back whose text isn't certain yet (half a character or stop)."""

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str]) -> None:
        self._decoder = tokenizer.stream_decoder()
        self._stops = StopStrings(stop)
        self._waiting: list[Token] = []

    @property
    def stopped(self) -> bool:
        return self._stops.found is not None

    def push(self, token: Token) -> list[Token]:
        """The tokens that may be shown now, with their text."""
        shown = self._stops.push(self._decoder.push(token.id))
        # What `dataclasses.replace` makes takes three times as long, between two steps.
        self._waiting.append(Token(token.id, shown, token.drafted, token.logprob, token.top_logprobs))
        certain = self.stopped or not (self._stops.holds or self._decoder.pending)
        return self._release() if certain else []

    def finish(self) -> list[Token]:
        """The rest, once no more tokens come."""
        if not self.stopped:
            rest = self._stops.push(self._decoder.finish()) + self._stops.finish()
            if rest:
                self._waiting[-1] = replace(self._waiting[-1], text=self._waiting[-1].text + rest)
        return self._release()

    def _release(self) -> list[Token]:
        released, self._waiting = self._waiting, []
        return released
