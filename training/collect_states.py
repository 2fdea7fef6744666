"""Texts that a model writes, with its hidden states: what `train_draft_head.py` learns from.

python training/collect_states.py MODEL OUT.npz --tokens 300000

A draft head has to predict what its target model writes, so the target writes the training text itself: no
corpus is needed. A third is sampled at temperature 1, a third at 0.6, and a third continues the beginning of
a sampled text greedily. Texts begin with one of STARTS; what follows CHAT is a question, which is answered.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import edgeinfer
from edgeinfer.model import Model

ROW_TOKENS = 256
"""Tokens of a row: whole texts one after the other, the last of which is cut."""
GROUP = 8
"""Texts written together."""
TEMPERATURES = (1.0, 0.6, 0.0)
CHAT, REPLY = "<|user|>\n", "<|end|>\n<|assistant|>\n"
STARTS = (CHAT, CHAT, CHAT, "", "Once upon a time", "One day,", "There was", "The", '"', "In the")
"""Texts after the first token."""


class Writer:
    """Endless texts of the model, as ids that include their start."""

    def __init__(self, model: Model, seed: int) -> None:
        self._model, self._random = model, np.random.default_rng(seed)
        tokenizer = model.tokenizer
        self._first = [tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id]
        self._reply = tokenizer.encode(REPLY, special=True)
        self._known: list[list[int]] = []

    def texts(self) -> Iterator[list[int]]:
        for turn in range(10**9):
            temperature = TEMPERATURES[turn % len(TEMPERATURES)]
            made = self._sampled(temperature) if temperature else self._continued()
            self._known = [*self._known, *made][-500:] if temperature else self._known
            yield from made

    def _sampled(self, temperature: float) -> list[list[int]]:
        starts = [STARTS[index] for index in self._random.integers(len(STARTS), size=GROUP)]
        encode = self._model.tokenizer.encode
        made = self._complete([[*self._first, *encode(text, special=True)] for text in starts], temperature)
        asked = [index for index, text in enumerate(starts) if text == CHAT]
        replies = self._complete([[*made[index], *self._reply] for index in asked], temperature)
        for index, whole in zip(asked, replies, strict=True):
            made[index] = [*whole, self._reply[0]]
        return made

    def _continued(self) -> list[list[int]]:
        """The beginnings of known texts, continued greedily."""
        whole = [self._known[index] for index in self._random.integers(len(self._known), size=GROUP)]
        return self._complete([each[: int(self._random.integers(4, 64))] for each in whole], 0.0)

    def _complete(self, prompts: list[list[int]], temperature: float) -> list[list[int]]:
        if not prompts:
            return []
        limit = int(self._random.integers(64, 320))
        answers = self._model.generate(prompts, max_tokens=limit, temperature=temperature)
        return [[*prompt, *answer.ids] for prompt, answer in zip(prompts, answers, strict=True)]


def rows(writer: Writer, count: int) -> np.ndarray:
    """(count, ROW_TOKENS) int32: rows of texts."""
    found, row, began = list[list[int]](), list[int](), time.perf_counter()
    for ids in writer.texts():
        row += ids
        while len(row) >= ROW_TOKENS:
            found.append(row[:ROW_TOKENS])
            row = []
            if len(found) % 100 == 0:
                print(f"{len(found)} of {count} rows, {time.perf_counter() - began:.0f} s", flush=True)
        if len(found) >= count:
            return np.array(found[:count], np.int32)
    raise AssertionError("endless")


def states(model: Model, ids: np.ndarray) -> np.ndarray:
    """(rows, ROW_TOKENS, hidden size) float16: the hidden states after the output norm."""
    found = []
    for row in ids.tolist():
        model.engine.rewind(0)
        found.append(model.engine.rows(row).astype(np.float16))
    model.engine.rewind(0)
    return np.stack(found)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="the target: a name or a .gguf file")
    parser.add_argument("out", type=Path, help="the .npz file to write")
    parser.add_argument("--tokens", type=int, default=300_000, help="(%(default)s)")
    parser.add_argument("--threads", type=int, help="(all)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    options = parser.parse_args()
    with edgeinfer.load(options.model, draft=None, device="cpu", threads=options.threads) as model:
        ids = rows(Writer(model, options.seed), max(2, options.tokens // ROW_TOKENS))
        np.savez(options.out, ids=ids, states=states(model, ids))


if __name__ == "__main__":
    main()
