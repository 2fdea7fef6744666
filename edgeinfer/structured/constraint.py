"""Computes the allowed next tokens of a completion with a grammar."""

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.protocols import TextTokenizer
from edgeinfer.errors import EdgeInferError, SettingError
from edgeinfer.structured.compiler import one_line
from edgeinfer.structured.endings import CHECK_INTERVAL, MAX_ENDING, SEARCH_INTERVAL, SPARE_TOKENS, Endings
from edgeinfer.structured.grammars import Grammar, engine, requested_grammar
from edgeinfer.structured.helper_thread import HelperThread, PendingResult

Mask = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.int64]

WORD_BITS = 64
FEW_WORDS = 16
"""With at most this many nonzero words, reading single bits is faster than unpacking all with numpy."""
LARGE_VOCABULARY = 16384
"""With a smaller vocabulary, a thread switch takes as long as computing the mask."""


class Constraint:
    """The grammar state of one completion. `finder`: a thread that computes masks while the model runs, if a
    core is idle.
    """

    def __init__(
        self,
        matcher: Any,
        vocabulary_size: int,
        finder: HelperThread | None = None,
        endings: Endings | None = None,
    ) -> None:
        self.matcher = matcher
        self._finder = finder
        self._pending_mask: PendingResult[None] | None = None
        self._words = np.zeros(-(-vocabulary_size // WORD_BITS), np.uint64)
        self._buffer = self._words.ctypes.data, 4 * -(-vocabulary_size // 32)
        self._size = vocabulary_size
        self._found = False
        """Whether `_words` has the mask of the next token."""
        self._forced: list[int] | None = None
        self.endings = endings
        self._left = sys.maxsize
        self._search_from = MAX_ENDING
        self._ending: list[int] | None = None
        """An ending from here, if one is known."""
        self._pending_ending: tuple[int, list[int]] | None = None
        """A token that may be accepted next, and an ending after it."""
        self._closing: list[int] = []
        """The rest of the ending in progress."""
        self.closed_early = False
        """Whether the completion was closed because few tokens were left."""

    def limit(self, tokens: int) -> None:
        """Set the maximum number of tokens of the completion."""
        self._left = tokens

    def token_or_ending(self, token_id: int) -> int:
        """The sampled token, or the first token of an ending if no ending would fit after the sampled one.

        Checked every `CHECK_INTERVAL` tokens while at least `SPARE_TOKENS` are left besides an ending; after
        that at every token.
        """
        if self.endings is None or self._left > self._search_from:
            return token_id
        if self._closing:
            return self._closing[0]
        matcher, left = self._idle(), self._left - 1
        ending = self._ending
        if ending is None or len(ending) > left or not self.endings.completes(matcher, [token_id, *ending]):
            ending = self.endings.after(matcher, token_id)
        if ending is not None and len(ending) <= left:
            if left > len(ending) + SPARE_TOKENS:
                self._ending, self._search_from = None, left - CHECK_INTERVAL
            else:
                self._pending_ending = token_id, ending
            return token_id
        own = self._ending
        if own is None and ending is not None:  # the ending after the sampled token is too long
            own = self._ending = self.endings.after(matcher)
        if own is None or len(own) > self._left:
            self._ending, self._search_from = None, self._left - SEARCH_INTERVAL
            return token_id
        first = own[0] if own else self.endings.end_id
        if first is None:
            return token_id
        self._closing, self.closed_early = list(own), True
        self._forced = None
        return first

    def begin(self) -> None:
        """Start computing the mask in the background."""
        if self._finder and not self._found and self._pending_mask is None:
            self._pending_mask = self._finder.do(self._find)

    def allowed(self) -> Mask:
        """(vocabulary,) bool: the allowed next tokens, including end tokens.

        Raises:
            EdgeInferError: the grammar has grown beyond llguidance's limits.
        """
        bits = np.unpackbits(self._allowed_words().view(np.uint8), count=self._size, bitorder="little")
        return bits.view(np.bool_)

    def few(self) -> Ids | None:
        """The allowed next tokens, rising; None: their bits are in more than `FEW_WORDS` words, or there are
        none.

        Raises: as `allowed`.
        """
        words = self._allowed_words()
        indices = words.nonzero()[0]
        if not 0 < indices.size <= FEW_WORDS:
            return None
        ids = []
        for index, word in zip(indices.tolist(), words[indices].tolist(), strict=True):
            while word:
                lowest = word & -word
                ids.append(WORD_BITS * index + lowest.bit_length() - 1)
                word ^= lowest
        return np.array(ids, np.int64)

    def allows(self, token_id: int) -> bool:
        """Whether a token is allowed next; doesn't compute the whole mask if it isn't known yet."""
        if self._found or self._pending_mask is not None:
            word = int(self._allowed_words()[token_id // WORD_BITS])
            return bool(word >> token_id % WORD_BITS & 1)
        # Where a text is forced, only its canonical tokens are allowed, not other tokenizations.
        forced = self.forced()
        if forced:
            return token_id == forced[0]
        if self.matcher.validate_tokens([token_id]) == 1:
            return True
        self._refuse_errors()
        return False

    def _allowed_words(self) -> npt.NDArray[np.uint64]:
        if self._pending_mask is not None:
            coming, self._pending_mask = self._pending_mask, None
            coming.result()
        elif not self._found:
            self._find()
        return self._words

    def _find(self) -> None:
        self.matcher.unsafe_compute_mask_ptr(*self._buffer)
        self._refuse_errors()
        self._found = True

    def _idle(self) -> Any:
        """The matcher, after the background computation has finished."""
        if self._pending_mask is not None:
            self._allowed_words()
        return self.matcher

    def accept(self, token_id: int) -> None:
        """Update with `token_id`, an allowed token."""
        matcher = self._idle()
        self._found, self._forced = False, None
        self._left -= 1
        self._closing = self._closing[1:] if self._closing[:1] == [token_id] else []
        if self._pending_ending is not None and self._pending_ending[0] == token_id:
            self._ending = self._pending_ending[1]
        elif self._ending is not None:
            self._ending = self._ending[1:] if self._ending[:1] == [token_id] else None
        self._pending_ending = None
        matcher.consume_token(token_id)
        self._refuse_errors()

    @property
    def finished(self) -> bool:
        """Whether only the end may follow."""
        return bool(self._idle().is_stopped())

    def forced(self) -> list[int]:
        """The forced tokens: those without an alternative, or an ending because the limit is near."""
        if self._forced is None:
            self._forced = self._closing or self._idle().compute_ff_tokens()
        return self._forced

    def _refuse_errors(self) -> None:
        if self.matcher.is_error():
            raise EdgeInferError(f"the completion's grammar failed: {one_line(self.matcher.get_error())}")


class GrammarVocabulary:
    """A model's vocabulary for grammars; built once, in some tenths of a second for 100,000 tokens.

    `spare_core`: the model leaves a core idle while it computes, which helps with a large vocabulary.
    """

    def __init__(self, tokenizer: TextTokenizer, vocabulary_size: int, spare_core: bool = False) -> None:
        llguidance = engine()
        self._matcher = llguidance.LLMatcher
        self._size = vocabulary_size
        spare_core = spare_core and vocabulary_size >= LARGE_VOCABULARY
        self._finder = HelperThread("grammar") if spare_core else None
        ends = sorted(tokenizer.end_ids)
        tokens = _Tokens(tokenizer)
        self._tokens = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(tokens), n_vocab=vocabulary_size, eos_token=ends or None
        )
        self._endings = Endings(tokens.by_bytes, ends[0] if ends else None)

    def constraint(self, grammar: Grammar) -> Constraint:
        """A new constraint for a grammar.

        Raises:
            SettingError: nothing can satisfy it, or it uses features that llguidance doesn't support.
        """
        matcher = self._matcher(self._tokens, grammar.compiled, log_level=0)
        if matcher.is_error():
            raise SettingError(f"{grammar.kind}: {one_line(matcher.get_error())}")
        return Constraint(matcher, self._size, self._finder, self._endings)


class _Tokens:
    """A tokenizer with llguidance's interface."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        ids = range(tokenizer.vocabulary_size)
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.end_ids, default=0)
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = [i for i in ids if tokenizer.is_control(i)]
        self.tokens = [tokenizer.token_bytes(i) for i in ids]

    @cached_property
    def by_bytes(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {raw: i for i, raw in reversed(list(enumerate(self.tokens))) if raw and i not in special}

    def __call__(self, text: bytes) -> Sequence[int]:
        """The ids of a text that continues another: without the leading space that some tokenizers add."""
        ids = self._tokenizer.encode(text.decode("utf-8", "replace"))
        if b"".join(self.tokens[i] for i in ids) != b" " + text:
            return ids
        first = self.tokens[ids[0]][1:]
        return [*self._longest_matches(first), *ids[1:]]

    def _longest_matches(self, text: bytes) -> list[int]:
        ids: list[int] = []
        while text:
            size = next((n for n in range(len(text), 0, -1) if text[:n] in self.by_bytes), 0)
            if not size:
                break
            ids.append(self.by_bytes[text[:size]])
            text = text[size:]
        return ids


class Grammars:
    """Constraints for requests of one model, whose vocabulary is prepared at the first one.

    `tokenizer`, `vocabulary_size`, `spare_core`: as for `GrammarVocabulary`.
    """

    def __init__(self, tokenizer: TextTokenizer, vocabulary_size: int, spare_core: bool) -> None:
        self._arguments = tokenizer, vocabulary_size, spare_core

    @cached_property
    def _vocabulary(self) -> GrammarVocabulary:
        return GrammarVocabulary(*self._arguments)

    def constraint(
        self, schema: Mapping[str, Any] | str | bool | None, grammar: str | None
    ) -> Constraint | None:
        """A new constraint from a schema or a grammar; None without both.

        Raises:
            SettingError: both are given, or one can't be satisfied.
        """
        requested = requested_grammar(schema, grammar)
        return None if requested is None else self._vocabulary.constraint(requested)
