"""Finds endings: tokens that complete a grammar from its current state, for when few tokens are left."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

MAX_ENDING = 256
"""Maximum tokens of an ending; the search starts when this many tokens are left."""
SEARCH_INTERVAL = 16
"""Tokens until the next search if no ending fits."""
SPARE_TOKENS = 64
CHECK_INTERVAL = 8
"""While at least this many tokens are left besides an ending, it is checked at this interval only: a check
takes as long as processing the ending."""
_USES_PER_ROUND = 8
"""How often a token that closes nothing is used before others of its kind."""
_BRACKETS = re.compile(rb"[\]})]+")
_QUOTES = re.compile(rb'["\'][\]})]*')
_SEPARATORS = b",:"


class Endings:
    """Finds endings in one vocabulary. `by_bytes`: ids of tokens by their bytes; `end_id`: the end token."""

    def __init__(self, by_bytes: Mapping[bytes, int], end_id: int | None) -> None:
        short = sorted((raw for raw in by_bytes if len(raw) <= 4), key=lambda raw: (-len(raw), raw))
        self._brackets = [by_bytes[raw] for raw in short if _BRACKETS.fullmatch(raw)]
        self._quotes = [by_bytes[raw] for raw in short if _QUOTES.fullmatch(raw)]
        self._escape = by_bytes.get(b"\\")
        order = sorted(range(256), key=lambda byte: (byte not in _SEPARATORS, not 32 < byte < 127, byte))
        self._others = [by_bytes[raw] for byte in order if (raw := bytes([byte])) in by_bytes]
        self.end_id = end_id

    def completes(self, matcher: Any, tokens: Sequence[int]) -> bool:
        """Whether the grammar may end after these tokens."""
        if self.end_id is None:
            return False
        return bool(matcher.validate_tokens([*tokens, self.end_id]) == len(tokens) + 1)

    def after(self, matcher: Any, token_id: int | None = None) -> list[int] | None:
        """An ending from a matcher's state, or from the state after `token_id`; None: none was found.

        Not always the shortest: where the grammar has alternatives, closing characters are tried first, then
        single characters in a fixed order.
        """
        ahead = matcher.deep_copy()
        if token_id is not None and not ahead.consume_token(token_id):
            return None
        ids: list[int] = []
        taken: Counter[int] = Counter()
        while len(ids) <= MAX_ENDING and not ahead.is_error():
            if ahead.is_stopped() or ahead.is_accepting():
                return ids
            tokens = ahead.compute_ff_tokens() or self._next_token(ahead, taken)
            if not tokens or not ahead.consume_tokens(tokens):
                return None
            ids += tokens
        return None

    def _next_token(self, matcher: Any, taken: Counter[int]) -> list[int]:
        """One token to continue with; empty if no single character is allowed."""
        # Where an escape is allowed, a string is open: a quote closes it, a bracket would be part of it.
        in_text = self._escape is not None and matcher.validate_tokens([self._escape]) == 1
        for token in (*self._quotes, *self._brackets) if in_text else self._brackets:
            if taken[token] < MAX_ENDING // _USES_PER_ROUND and matcher.validate_tokens([token]) == 1:
                taken[token] += 1
                return [token]
        best: list[int] = []
        for token in self._others:
            if best and taken[token] // _USES_PER_ROUND >= taken[best[0]] // _USES_PER_ROUND:
                continue
            if matcher.validate_tokens([token]) == 1:
                best = [token]
                if taken[token] < _USES_PER_ROUND:
                    break
        taken.update(best)
        return best
