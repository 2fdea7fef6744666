"""Tunes the tile configs of a decode step's kernels for this GPU: tried within the step, and saved.

The fastest kernel in isolation need not be the fastest in a step, where adjacent kernels overlap. So every
trial is timed as a replay of the whole step, with one kernel changed.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any, Protocol

from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.tuning.step_shapes import MAX_SPLITS, RowKernel, Shape, TensorShape, Tuning
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights, blocks_of
from edgeinfer_kernels.matrix import Matrix

GAIN = 0.003
"""Minimum relative gain in step time for a trial to be kept; replays vary by a third of that."""
FILE = "cuda_tuning.json"
REGISTERS = (0, *range(64, 256, 8))
"""Limits of registers that a tuning may have."""
KERNEL_SOURCES = (
    "triton_ops/words.py", "triton_ops/tiles.py", "triton_ops/embedding_kernels.py",
    "triton_ops/norm_kernels.py", "triton_ops/cache_tiles.py", "decode/projections.py",
    "decode/gemv_kernels.py", "decode/decode_attention.py", "blocks/common/attention_splits.py",
    "decode/step_rope.py", "decode/decode_step.py",
    "decode/step_launches.py", "decode/step_norms.py", "tuning/step_shapes.py", "prefill/expert_kernels.py",
    "blocks/attention.py", "blocks/feed_forward.py", "blocks/moe.py", "blocks/latent_attention.py",
    "decode/latent_kernels.py", "decode/tensor_cores.py", "triton_ops/tile_decoding.py",
)  # fmt: skip
"""If one of these files changes, saved tunings become invalid."""

_ONE = (Shape(64, 4), Shape(32, 2), Shape(64, 8), Shape(128, 8), Shape(32, 4), Shape(128, 4))
_TWO = (Shape(32, 4, 2, 1), Shape(32, 4, 1, 1), Shape(64, 4), Shape(64, 8, 1, 1), Shape(64, 4, 2, 1))
_FOUR = (Shape(32, 4, 1), Shape(16, 2, 1), Shape(64, 4, 2), Shape(32, 8, 1, 1), Shape(16, 4, 1, 1))
_EIGHT = (Shape(32, 4, 1), Shape(32, 8, 1), Shape(64, 8, 2), Shape(16, 2, 1))
_SHARED = {
    2: (Shape(32, 4, 1, 1, 4), Shape(64, 4, 2, 1, 2)),
    4: (Shape(64, 4, 2, 0, 2), Shape(32, 4, 1, 1, 4), Shape(32, 4, 1, 0, 2)),
    8: (Shape(32, 4, 1, 0, 2),),
}
"""Those of kernels that add to the hidden states, whose rows programs may share, by tokens."""
_WHOLE_ROWS: dict[tuple[int, RowKernel], tuple[Shape, ...]] = {
    (2, "down"): (Shape(64, 8, 1, 8),),
    (4, "qkv"): (Shape(32, 4, 1, 2, 1, 168),),
    (4, "down"): (Shape(32, 4, 1, 8, 2, 168),),
}
"""Those of some kernels with code for each iteration, by tokens. That of gate and up takes too long to
compile.
"""
_TENSOR = (
    TensorShape(16, 2, 2), TensorShape(16, 4, 2, 1), TensorShape(16, 8, 2, 1), TensorShape(32, 4, 2),
    TensorShape(16, 4, 2), TensorShape(),
)  # fmt: skip
_LIMITED: dict[tuple[int, RowKernel], tuple[TensorShape, ...]] = {
    (8, "gated"): (TensorShape(16, 2, 2, 0, 144),),
    (8, "qkv"): (TensorShape(16, 4, 2, 1, 168),),
    (16, "gated"): (TensorShape(16, 2, 2, 0, 168), TensorShape(16, 4, 2, 1, 168)),
}
"""Those of some kernels with a limit of registers, by tokens."""
_ATTENTION = ((32, 4), (16, 2), (16, 1), (64, 4), (64, 8), (16, 4))

Change = Callable[[Tuning], Tuning]


@dataclass(frozen=True)
class TuningCandidates:
    """Changes of one part of a tuning, tried in a step of `tokens` tokens."""

    tokens: int
    changes: tuple[Change, ...]


def _replacing(tokens: int, *changes: dict[str, Any]) -> TuningCandidates:
    return TuningCandidates(tokens, tuple(methodcaller("replace", **change) for change in changes))


def _row_shapes(tokens: int, kernel: RowKernel, shapes: Iterable[Shape]) -> TuningCandidates:
    return TuningCandidates(
        tokens, tuple(methodcaller("with_row_shape", tokens, kernel, shape) for shape in shapes)
    )


def _tensor_shapes(tokens: int, kernel: RowKernel, shapes: Iterable[TensorShape]) -> TuningCandidates:
    return TuningCandidates(
        tokens, tuple(methodcaller("with_tensor_shape", tokens, kernel, shape) for shape in shapes)
    )


def _of_tensor_cores(tokens: int) -> Iterable[TuningCandidates]:
    """The tile configs of each kernel on tensor cores in steps of some tokens."""
    for kernel in _KERNELS:
        yield _tensor_shapes(tokens, kernel, (*_TENSOR, *_LIMITED.get((tokens, kernel), ())))


def _of_tokens(tokens: int, shapes: Iterable[Shape]) -> Iterable[TuningCandidates]:
    """The tile configs of each kernel in steps of some tokens."""
    for kernel in _KERNELS:
        shared = _SHARED[tokens] if kernel in ("output", "down") else ()
        yield _row_shapes(tokens, kernel, (*shapes, *shared, *_WHOLE_ROWS.get((tokens, kernel), ())))


_KERNELS: tuple[RowKernel, ...] = ("gated", "down", "head", "qkv", "output")
CANDIDATES = (
    _row_shapes(1, "gated", _ONE),
    *(_row_shapes(1, kernel, _ONE) for kernel in _KERNELS[1:]),
    _replacing(1, *({"positions": p, "attention_warps": w} for p, w in _ATTENTION)),
    *_of_tokens(4, _FOUR),
    *_of_tokens(2, _TWO),
    *_of_tensor_cores(8),
    *_of_tokens(8, _EIGHT),
    *_of_tensor_cores(16),
)
"""Kernel by kernel; those that read most are first, and what gains most."""


class RejectedCandidateError(Exception):
    """A step that cannot be compiled with these tile configs, or whose registers spill; the message gives the
    reason.
    """


class TimeStep(Protocol):
    """Times steps with given tile configs."""

    def __call__(self, tuning: Tuning, tokens: int) -> float:
        """Seconds of a step with this many tokens.

        Raises:
            RejectedCandidateError: it can't be compiled, or its registers spill.
        """
        ...

    def compile(self, tunings: Sequence[Tuning], tokens: int) -> None:
        """Compile the kernels of steps that will be timed, on all CPUs."""
        ...


@dataclass(frozen=True)
class TuningResult:
    """The result of tuning: seconds of a step of one token with the initial and with the best tile
    configs.
    """

    tuning: Tuning
    seconds_before: float
    seconds: float
    trials: int


def tune(
    time_step: TimeStep,
    start: Tuning,
    budget_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> TuningResult:
    """Tune one kernel after the other; keep a change that makes the whole step faster by more than `GAIN`.

    A trial that seems faster is timed again before it is kept, and the best is timed again before each
    kernel's trials, because clocks drift. No trial starts after `budget_seconds`, which don't count the time
    that `start` takes to compile: it would have to be compiled without tuning too.

    Raises:
        RejectedCandidateError: from `start` itself.
    """
    time_step.compile([start], 1)
    best, before = start, time_step(start, 1)
    end = clock() + budget_seconds
    of_one, seconds, count = before, before, 0
    for index, candidates in enumerate(CANDIDATES):
        if clock() >= end:
            break
        time_step.compile([change(best) for change in candidates.changes], candidates.tokens)
        if index:
            seconds = time_step(best, candidates.tokens)
        for change in candidates.changes:
            if clock() >= end:
                break
            candidate = change(best)
            if candidate == best:
                continue
            count += 1
            limit = seconds * (1 - GAIN)
            if _seconds(time_step, candidate, candidates.tokens) < limit:
                again = _seconds(time_step, candidate, candidates.tokens)
                if again < limit:
                    best, seconds = candidate, again
        if candidates.tokens == 1:
            of_one = seconds
    return TuningResult(best, before, of_one, count)


def _seconds(time_step: TimeStep, candidate: Tuning, tokens: int) -> float:
    try:
        return time_step(candidate, tokens)
    except RejectedCandidateError:
        return math.inf


def tuning_key(gpu_name: str, specification: DecoderSpec, weights: DecoderWeights, kv: CacheType) -> str:
    """The key of a saved tuning: GPU, the model's kinds of blocks, and the kernel sources."""
    blocks = {
        (residual.block.kind, residual.block.head_shape, *_kind(*w.block.matrices()))
        for _, residual, w in blocks_of(specification, weights)
    }
    kinds = sorted(map(repr, blocks)), _kind(weights.output), kv
    digest = hashlib.sha256(repr(kinds).encode())
    for name in KERNEL_SOURCES:
        digest.update(Path(__file__).parents[1].joinpath(name).read_bytes())
    return f"{gpu_name} {digest.hexdigest()[:16]}"


def _kind(*matrices: Matrix | None) -> list[tuple[str, int, int] | None]:
    return [None if m is None else (m.format, m.rows, m.columns) for m in matrices]


def saved_tuning(folder: Path, key: str) -> Tuning | None:
    """The tuning saved by `save_tuning`; None if there is none, or it is unusable."""
    return _as_tuning(_load(folder / FILE).get(key))


def save_tuning(folder: Path, key: str, tuning: Tuning) -> None:
    """Save a tuning together with those of other keys. Raises `OSError` if the folder is not writable."""
    folder.mkdir(parents=True, exist_ok=True)
    known = _load(folder / FILE) | {key: asdict(tuning)}
    fresh = folder / f"{FILE}.{os.getpid()}"
    fresh.write_text(json.dumps(known, indent=1), encoding="utf-8")
    fresh.replace(folder / FILE)


def _load(file: Path) -> dict[str, Any]:
    """All saved tunings; empty if the file is missing or damaged, because it is only a cache."""
    try:
        known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def _as_tuning(saved: Any) -> Tuning | None:
    tuning = _parsed(saved, Tuning())
    return tuning if isinstance(tuning, Tuning) and tuning.splits <= MAX_SPLITS else None


def _parsed(saved: Any, usual: Any, minimum: int = 0, name: str = "") -> Any:
    """What was saved with the structure of `usual`, the value of a field of this name; None if it hasn't that
    structure.
    """
    if not is_dataclass(usual) or isinstance(usual, type):
        return saved if type(saved) is int and _is_valid(name, saved, minimum) else None
    names = [field.name for field in fields(usual)]
    if not isinstance(saved, dict) or saved.keys() != set(names):
        return None
    least = 1 if isinstance(usual, Tuning) else 0
    values = [_parsed(saved[name], getattr(usual, name), least, name) for name in names]
    return None if None in values else type(usual)(*values)


def _is_valid(name: str, value: int, minimum: int) -> bool:
    """Whether a field of this name can have the value."""
    if name == "registers":
        return value in REGISTERS
    return minimum <= value <= 1024 and value & (value - 1) == 0
