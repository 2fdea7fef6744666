"""How long the parts of an answer took."""

import time

from edgeinfer.results import Speed


class GenerationTimer:
    """How long the parts of one answer took, or of several side by side; what their reader does between two
    tokens doesn't count.
    """

    def __init__(self) -> None:
        self._prompt_tokens = self._cached = self._sampled = 0
        self._prefill_seconds = self._first_seconds = self._decode_seconds = 0.0
        self._since = 0.0

    def start(self, prompt_tokens: int, cached: int) -> None:
        self._prompt_tokens, self._cached = prompt_tokens, cached
        self._since = time.perf_counter()

    def prefilled(self) -> None:
        self._prefill_seconds = time.perf_counter() - self._since

    def resume(self) -> None:
        """The next token is being computed."""
        self._since = time.perf_counter()

    def decoded(self, tokens: int = 1) -> None:
        """So many tokens have been chosen."""
        seconds = time.perf_counter() - self._since
        if self._sampled:
            self._decode_seconds += seconds
        else:
            self._first_seconds = seconds
        self._sampled += tokens

    @property
    def decoded_tokens(self) -> int:
        """Those behind the first, which the prompt's reading gave."""
        return max(0, self._sampled - 1)

    def speed(self, generated: int, bytes_per_token: int) -> Speed:
        """`generated`: tokens of the answer, without the one that ended it."""
        prefill, decode = self._prefill_seconds, self._decode_seconds
        rate = self.decoded_tokens / decode if decode > 0 else 0.0
        return Speed(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached,
            generated_tokens=generated,
            seconds_to_first_token=self._first_seconds,
            prompt_tokens_per_second=(self._prompt_tokens - self._cached) / prefill if prefill > 0 else 0.0,
            decode_tokens_per_second=rate,
            gigabytes_per_second=rate * bytes_per_token / 1e9,
        )
