"""DRY: penalizes the token that would extend a repetition of earlier text."""

import math
from collections.abc import Callable, Sequence

from edgeinfer.options import SamplingParams
from edgeinfer.sampling.penalties import last_tokens

LARGEST_PENALTY = 1e30
LARGEST_LOGARITHM = math.log(LARGEST_PENALTY)


class SequenceBreakers:
    """Finds sequence breakers, strings that reset a repetition, in any tokenization.

    Without `token_bytes` (token id -> its bytes) no breaker applies.
    """

    def __init__(self, breakers: Sequence[str], token_bytes: Callable[[int], bytes] | None) -> None:
        self._breakers = [breaker.encode() for breaker in breakers] if token_bytes else []
        self._longest = max(map(len, self._breakers), default=0)
        self._token_bytes = token_bytes
        self._bytes_of: dict[int, bytes] = {}

    def holds_breaker(self, token_id: int) -> bool:
        """Whether the token's text contains a breaker."""
        return any(breaker in self._bytes(token_id) for breaker in self._breakers)

    def tokens_after(self, history: Sequence[int], limit: int) -> int:
        """Number of tokens after the last breaker; `limit` or the whole history if none is found.

        A breaker may begin in one token and end in a later one.
        """
        limit = min(limit, len(history))
        if not self._breakers:
            return limit
        following = b""
        for distance in range(1, limit + 1):
            own = self._bytes(history[-distance])
            text = own + following
            end = max(
                text.rfind(breaker) + len(breaker) if breaker in text else 0 for breaker in self._breakers
            )
            if end:
                return self._tokens_from(history, distance, end)
            following = text[: self._longest - 1]
        return limit

    def _tokens_from(self, history: Sequence[int], distance: int, size: int) -> int:
        """Number of tokens after the first `size` bytes that start `distance` tokens before the end."""
        while size > 0:
            size -= len(self._bytes(history[-distance]))
            distance -= 1
        return distance

    def _bytes(self, token_id: int) -> bytes:
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._token_bytes(token_id) if self._token_bytes else b""
            self._bytes_of[token_id] = known
        return known


def repeated_lengths(history: Sequence[int], limit: int) -> dict[int, int]:
    """For each token that followed an earlier occurrence of the current suffix: the length of that suffix.

    `limit` caps the lengths. Linear in the history: Z-algorithm over the reversed tokens, visiting only the
    occurrences of the last token. Source: Gusfield, Algorithms on Strings, section 1.4.
    """
    backwards = list(reversed(history))
    lengths: dict[int, int] = {}
    longest: dict[int, int] = {}
    left = right = position = 0
    while True:
        try:
            position = backwards.index(backwards[0], position + 1)
        except (ValueError, IndexError):
            return longest
        # Inside the box [left, right) the tokens repeat a section that has been measured.
        length = min(lengths.get(position - left, right - left), right - position) if position < right else 0
        if position + length >= right:
            while position + length < len(backwards) and backwards[length] == backwards[position + length]:
                length += 1
            left, right = position, position + length
        lengths[position] = length
        follower = backwards[position - 1]
        longest[follower] = max(longest.get(follower, 0), min(length, limit))


def dry_penalties(
    history: Sequence[int], settings: SamplingParams, breakers: SequenceBreakers
) -> dict[int, float]:
    """The DRY penalties: token id -> multiplier * base ** (repeated length - allowed length).

    Tokens that contain a breaker are exempt. Source: github.com/oobabooga/text-generation-webui, pull request
    5677.
    """
    recent = last_tokens(history, settings.dry_penalty_last_n)
    allowed = settings.dry_allowed_length
    growth = math.log(settings.dry_base)
    largest_exponent = int(LARGEST_LOGARITHM / growth) if growth > 1e-6 else 0
    limit = breakers.tokens_after(recent, allowed + largest_exponent)
    if limit < allowed:
        return {}
    return {
        token_id: min(settings.dry_multiplier * settings.dry_base ** (length - allowed), LARGEST_PENALTY)
        for token_id, length in repeated_lengths(recent, limit).items()
        if length >= allowed and not breakers.holds_breaker(token_id)
    }
