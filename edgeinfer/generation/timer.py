"""Timing of prefill and decoding of a completion."""

import time

from edgeinfer.results import Speed


class GenerationTimer:
    """Times the phases of one completion, or of a batch; time that the caller spends between tokens
    is excluded.
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
        """Start timing the next token."""
        self._since = time.perf_counter()

    def decoded(self, tokens: int = 1) -> None:
        """Count `tokens` sampled tokens."""
        seconds = time.perf_counter() - self._since
        if self._sampled:
            self._decode_seconds += seconds
        else:
            self._first_seconds = seconds
        self._sampled += tokens

    @property
    def decoded_tokens(self) -> int:
        """Tokens after the first, which prefill produced."""
        return max(0, self._sampled - 1)

    def speed(self, generated: int, bytes_per_token: int) -> Speed:
        """The speeds. `generated`: tokens of the completion, without the end token."""
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
