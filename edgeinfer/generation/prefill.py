"""Prefill: processes the part of a prompt that the KV cache doesn't hold."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.protocols import Engine
from edgeinfer.errors import ContextOverflowError, SettingError
from edgeinfer.generation.context_shift import shared_with
from edgeinfer.generation.loop import GenerationTimer
from edgeinfer.generation.request import Request, Restore


def rewind_to_shared(
    engine: Engine, ids: Sequence[int], restore: Restore | None = None, is_shifted: bool = False
) -> int:
    """Truncate the cache to its common prefix with a prompt, except the last token; returns its length.

    `is_shifted`: `ids` is the rest of a longer text after context shift. Raises the errors of `check_prompt`.
    """
    check_prompt(engine, ids)
    shared = engine.reusable(min(shared_with(engine, ids, is_shifted), len(ids) - 1))
    if restore is not None:
        shared = restore(list(ids[:-1]), shared)
    engine.rewind(shared)
    return shared


def check_prompt(engine: Engine, ids: Sequence[int]) -> None:
    """Raise if a prompt can't be read.

    Raises:
        SettingError: the prompt is empty.
        ContextOverflowError: it is longer than the context.
    """
    if not ids:
        raise SettingError("the prompt is empty, and this model has no token to begin with; give it a text")
    if len(ids) > engine.context:
        raise context_overflow(engine, len(ids))


def read_prompt(
    engine: Engine, request: Request, clock: GenerationTimer, is_shifted: bool = False
) -> npt.NDArray[np.float32]:
    """Prefill the uncached part of the prompt; returns the logits after its last token, (vocabulary,).

    Raises the errors of `rewind_to_shared`.
    """
    shared = rewind_to_shared(engine, request.prompt_ids, request.restore, is_shifted)
    clock.start(len(request.prompt_ids), shared)
    logits = engine.append(request.prompt_ids[shared:], request.progress)
    clock.prefilled()
    return logits


def context_overflow(engine: Engine, count: int) -> ContextOverflowError:
    """The error for a prompt of `count` tokens, which is more than the context."""
    remedy = "shorten it: the model wasn't trained for more, or this machine's memory doesn't hold it"
    if engine.largest_context > engine.context:
        most = f"up to {engine.largest_context} the model was trained for and fits this machine"
        remedy = f"shorten it, or take a larger context (context=): {most}"
    return ContextOverflowError(
        f"the prompt has {count} tokens, the context holds {engine.context}; {remedy}"
    )
