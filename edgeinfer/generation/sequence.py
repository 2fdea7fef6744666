"""One completion in progress: its ids, its sampler, its text, and why it ends."""

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.protocols import TextTokenizer
from edgeinfer.generation.detokenizer import Detokenizer
from edgeinfer.generation.request import Request
from edgeinfer.generation.sampled_token import SampledToken
from edgeinfer.results import FinishReason, Token
from edgeinfer.sampling import Sampler, logprobs


class GenerationSequence:
    """A prompt and its completion so far. `constraint` of the request: the allowed tokens, used up by this
    sequence. `context`: tokens that the KV cache holds.
    """

    def __init__(
        self, request: Request, tokenizer: TextTokenizer, vocabulary_size: int, context: int
    ) -> None:
        self.request = request
        self.constraint = request.constraint
        self.sampler = Sampler(request.sampling, vocabulary_size, tokenizer.token_bytes, self.constraint)
        self.ids = list(request.prompt_ids)
        """The prompt and the completion, without tokens that a context shift has evicted."""
        self.evicted = 0
        """Number of tokens that context shift has evicted, or left out of the prompt."""
        self.max_tokens = request.most_tokens(context)
        self.sampled: list[Token] = []
        """The sampled tokens, without the end token; their text may still be incomplete."""
        self.reason: FinishReason | None = None
        self._end_ids = tokenizer.end_ids
        self._text = Detokenizer(tokenizer, request.stop)
        self._full_reason = request.full_reason(context)
        if self.constraint is not None:
            self.constraint.limit(self.max_tokens)
        if self.max_tokens == 0:
            self.reason = self._full_reason

    @property
    def remaining(self) -> int:
        """Maximum number of further tokens."""
        return self.max_tokens - len(self.sampled)

    def sample(self, logits: npt.NDArray[np.float32]) -> SampledToken:
        """Sample the next token from the logits after the last one."""
        token = self.sampler.sample(logits, self.ids)
        self.sampler.accept(token)
        return SampledToken(token, logits)

    def append(self, sampled: SampledToken, is_last: bool = True) -> list[Token]:
        """Append a token and set `reason` if it is the last one. Returns the tokens that can be emitted.

        `is_last`: no further sampled token follows from the same step.
        """
        constraint = self.constraint
        if sampled.id in self._end_ids:
            self.reason = self._complete_reason()
            return []
        self.ids.append(sampled.id)
        token = described(sampled, self.request.logprobs)
        self.sampled.append(token)
        emitted = self._text.push(token)
        if self._text.stopped:
            self.reason = "stop"
        elif constraint is not None and is_last and constraint.finished:
            self.reason = self._complete_reason()
        elif self.remaining == 0:
            self.reason = self._full_reason
        return emitted

    def finish(self) -> list[Token]:
        """The tokens whose text was incomplete until the end."""
        return self._text.finish()

    def _complete_reason(self) -> FinishReason:
        """The finish reason of a completion that the model or its grammar has ended."""
        closed = self.constraint is not None and self.constraint.closed_early
        return self._full_reason if closed else "stop"


def described(sampled: SampledToken, top_n: int | None) -> Token:
    """The token without its text, with its log-probability and the `top_n` best ones if requested."""
    if top_n is None or sampled.logits is None:
        return Token(sampled.id, "", sampled.drafted)
    own, best = logprobs(sampled.logits, sampled.id, top_n)
    return Token(sampled.id, "", sampled.drafted, logprob=own, top_logprobs=best)
