"""Engines with scripted logits, over a vocabulary of bytes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer import Model
from edgeinfer.chat_templates.chat_format import ChatFormat
from edgeinfer.engine.protocols import BasicEngine, PromptSteps
from edgeinfer.sampling import Sampler
from edgeinfer.snapshots.snapshot_file import Snapshot
from edgeinfer.tokenizer import Tokenizer
from tests.random_models import CHAT_TEMPLATE, VOCABULARY, vocabulary_metadata

END = 2
"""The token that ends a completion."""
FIRST_BYTE = 3
"""The token of byte 0."""
STEP = 4
"""Tokens per prefill chunk."""
LogitsFunction = Callable[[list[int]], npt.NDArray[np.float32]]


class FakeEngine(BasicEngine):
    """Its logits are a function of the tokens in its cache, so a wrong cache gives a wrong completion."""

    def __init__(self, logits_function: LogitsFunction, context: int = 64) -> None:
        self.logits_function = logits_function
        self.context = context
        self.largest_context = 4 * context
        self.vocabulary_size = VOCABULARY
        self.bytes_per_token = 1000
        self.ids: list[int] = []
        self.read: list[int] = []
        """The token count of each call."""
        self.interrupt_at: int | None = None
        """With this many tokens in the cache, the next forward raises KeyboardInterrupt."""
        self.closed = False

    def prompt_steps(self, ids: Sequence[int], limit: int | None = None) -> PromptSteps:
        self.read.append(len(ids))
        for first in range(0, len(ids), STEP):
            if self.interrupt_at is not None and len(self.ids) >= self.interrupt_at:
                self.interrupt_at = None
                raise KeyboardInterrupt
            self.ids += ids[first : first + STEP]
            yield min(first + STEP, len(ids))
        assert len(self.ids) <= self.context
        return self.logits_function(self.ids)

    def append_all(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        return np.stack([self.append([token_id]) for token_id in ids])

    def rows(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        return self.append_all(ids)

    def snapshot(self) -> Snapshot:
        return Snapshot(list(self.ids), [np.array(self.ids)])

    def restore(self, snapshot: Snapshot, length: int) -> None:
        self.ids = [int(token) for token in snapshot.arrays[0][:length]]

    def device_sampler(self, sampler: Sampler) -> None:
        return None

    def rewind(self, length: int) -> None:
        assert length <= len(self.ids)
        del self.ids[length:]

    def close(self) -> None:
        self.closed = True


def byte_ids(text: str | bytes) -> list[int]:
    """One token per byte."""
    return [FIRST_BYTE + byte for byte in (text.encode() if isinstance(text, str) else text)]


def scripted(text: str | bytes, after: int) -> LogitsFunction:
    """Logits for `text` after a prompt of `after` tokens, one token per byte, then the end."""
    script = [*byte_ids(text), END]

    def completion(ids: list[int]) -> npt.NDArray[np.float32]:
        logits = np.zeros(VOCABULARY, np.float32)
        logits[script[min(len(ids) - after, len(script) - 1)]] = 30.0
        return logits

    return completion


def seeded_logits(ids: list[int]) -> npt.NDArray[np.float32]:
    """Random logits, the same for the same tokens; never the end."""
    logits = np.random.default_rng(ids).standard_normal(VOCABULARY).astype(np.float32) * 3
    logits[END] = -30
    return logits


def model_on(
    engine: FakeEngine, template: str | None = CHAT_TEMPLATE, metadata: Mapping[str, Any] | None = None
) -> Model:
    """A model on an engine, with the tokenizer of the random models, some keys changed by `metadata`."""
    tokenizer = Tokenizer.from_metadata({**vocabulary_metadata(), **(metadata or {})})
    return Model("fake", engine, tokenizer, ChatFormat(template, "<s>", "</s>") if template else None)


def scripted_model(
    text: str | bytes, prompt: Sequence[int] = (1, 5, 6), context: int = 64
) -> tuple[Model, list[int]]:
    """A model that completes `prompt` with `text`, and that prompt."""
    return model_on(FakeEngine(scripted(text, len(prompt)), context)), list(prompt)
