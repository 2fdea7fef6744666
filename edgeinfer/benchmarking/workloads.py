"""Workloads: a prompt, a generation, or a draft verification, each at a given depth."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Kind = Literal["prompt", "generate", "verify"]
_PREFIX: dict[Kind, str] = {"prompt": "pp", "generate": "tg", "verify": "vf"}
WARM_UP_TOKENS = 1


@dataclass(frozen=True)
class Workload:
    """`tokens` at once (prompt, verify) or one by one (generate), after `depth` tokens in the KV cache."""

    kind: Kind
    tokens: int
    depth: int = 0

    @property
    def name(self) -> str:
        """The name as in llama-bench: pp512, tg128, pp512 @ d4096."""
        return f"{_PREFIX[self.kind]}{self.tokens}" + (f" @ d{self.depth}" if self.depth else "")

    @property
    def context(self) -> int:
        """Required context in tokens."""
        return self.depth + self.tokens + WARM_UP_TOKENS


def workloads(prompts: Sequence[int], generates: Sequence[int], depths: Sequence[int]) -> list[Workload]:
    """Every prompt and every generation at every depth; lengths of 0 are omitted."""
    result = []
    for depth in depths:
        result += [Workload("prompt", tokens, depth) for tokens in prompts if tokens]
        result += [Workload("generate", tokens, depth) for tokens in generates if tokens]
    return result


def needed_context(workloads: Sequence[Workload]) -> int:
    """Context in tokens for the largest workload."""
    return max(workload.context for workload in workloads)


def random_ids(count: int, vocabulary_size: int, seed: int) -> list[int]:
    """Uniformly sampled token ids; equal for equal seeds, and a longer list begins with a shorter one."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocabulary_size, count)]
