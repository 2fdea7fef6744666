"""Texts that a model writes: what `train_draft_head.py` learns from.

python training/write_texts.py MODEL.gguf TEXTS.npz --tokens 300000 --device cpu

A draft head has to predict what its target model writes, so the target writes the training text itself: no
corpus is needed. A row has whole texts one after the other, the last of which is cut. It begins with one of
STARTS; its first tokens, and those of each later text, are sampled at temperature 1, so that texts differ;
the others at the row's temperature. After CHAT the model writes a question and answers it.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from frozen_target import Decoder, Target
from torch import Tensor

from edgeinfer.tokenizer import Tokenizer

TEMPERATURES = (0.0, 0.0, 0.0, 0.5, 0.8, 1.0)
"""Of a row, each as likely."""
FREE = (4, 64)
"""The first tokens of a text that are sampled at temperature 1: at least, and less than."""
MIN_P = 0.02
"""Less probable tokens, relative to the best one, aren't sampled."""
RANDOM_START = 0.02
"""The share of rows that begin with random tokens, as texts of a user may."""
CHAT = "<|user|>\n"
STARTS = (
    *[CHAT] * 6,
    *["", "Once upon a time"] * 3,
    *("One day,", "There was", "The", "A", '"', "In the", "It was"),
    *("Tom", "Lily and", "Ben and", "Max", "A little", "Mom"),
)
"""Texts after the first token."""


class Rows:
    """Rows of text that are written together."""

    def __init__(self, target: Target, count: int, tokens: int, seed: int) -> None:
        self._target, self._count, self._tokens = target, count, tokens
        self._random = torch.Generator(target.device).manual_seed(seed)
        self._host = np.random.default_rng(seed)
        tokenizer = Tokenizer.from_metadata(target.file.metadata)
        self._end = tokenizer.eos_id
        self._first = self._end if tokenizer.bos_id is None else tokenizer.bos_id
        self._starts = [tokenizer.encode(text, special=True) for text in STARTS]
        self._vocabulary = len(target.embedding)

    def _given(self) -> Tensor:
        """(rows, tokens): the given tokens at the beginning of each row, -1 for the others."""
        given = np.full((self._count, self._tokens), -1, np.int64)
        given[:, 0] = self._first
        for row in given:
            start = self._starts[self._host.integers(len(self._starts))]
            if self._host.random() < RANDOM_START:
                start = self._host.integers(self._vocabulary, size=8).tolist()
            row[1 : 1 + len(start)] = start
        return torch.from_numpy(given).to(self._target.device)

    def write(self) -> Tensor:
        """(rows, tokens) ids."""
        decoder, given = Decoder(self._target, self._count, self._tokens), self._given()
        device, ids = self._target.device, given.clone()
        choice = self._host.choice(np.array(TEMPERATURES, np.float32), self._count)
        temperature = torch.from_numpy(choice).to(device)
        free = self._free()
        for position in range(self._tokens - 1):
            logits = decoder.logits(ids[:, position], position)
            now = torch.where(free > 0, 1.0, temperature)
            found = self._sampled(logits, now)
            wanted = given[:, position + 1]
            ids[:, position + 1] = torch.where(wanted >= 0, wanted, found)
            is_new = ids[:, position + 1] == self._end
            free = torch.where(is_new, self._free(), free - 1)
        return ids

    def _free(self) -> Tensor:
        return torch.randint(*FREE, (self._count,), generator=self._random, device=self._target.device)

    def _sampled(self, logits: Tensor, temperature: Tensor) -> Tensor:
        best = logits.max(-1, keepdim=True).values
        is_cold = temperature == 0
        scaled = (logits - best) / torch.where(is_cold, 1.0, temperature)[:, None]
        noise = torch.empty_like(logits).exponential_(generator=self._random).log()
        scores = torch.where(scaled < np.log(MIN_P), -torch.inf, scaled - noise)
        return torch.where(is_cold, logits.argmax(-1), scores.argmax(-1))


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="the target's .gguf file")
    parser.add_argument("out", type=Path, help="the .npz file to write")
    parser.add_argument("--tokens", type=int, default=300_000, help="(%(default)s)")
    parser.add_argument("--row", type=int, default=512, help="tokens of a row (%(default)s)")
    parser.add_argument("--together", type=int, default=64, help="rows written together (%(default)s)")
    parser.add_argument("--device", default="cpu", help="of torch (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    target = Target(options.model, torch.device(options.device))
    count, began, written = max(2, options.tokens // options.row), time.perf_counter(), list[np.ndarray]()
    together = min(count, options.together)
    rows = Rows(target, together, options.row, options.seed)
    while (done := together * len(written)) < count:
        written.append(rows.write().cpu().numpy().astype(np.int32))
        print(f"{done + together} of {count} rows, {time.perf_counter() - began:.0f} s", flush=True)
    np.savez_compressed(options.out, ids=np.concatenate(written)[:count])


if __name__ == "__main__":
    main()
