"""Evaluates a model on a text, alone or against a base; both process the same windows in slices."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from edgeinfer.engine.protocols import TextTokenizer
from edgeinfer.errors import EdgeInferError
from edgeinfer.evaluation.logit_sources import EngineSource, LlamaCppSource, LogitSource, window_slices
from edgeinfer.evaluation.scores import Scores, score
from edgeinfer.evaluation.summary import Evaluation, summarize
from edgeinfer.evaluation.windows import Windows
from edgeinfer.llama_cpp.context import LlamaCppContext
from edgeinfer.loading.loading import load
from edgeinfer.model import Model
from edgeinfer.registry.registry import find_model
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cpu.runtime.abi import SPARSE_TOKENS
from edgeinfer_kernels.system.processor import usable_cpus

LLAMA_CPP = "llama.cpp"
DEFAULT_CONTEXT = 512

Report = Callable[[int, int], None]
"""Called with (windows done, total windows)."""


def evaluate(
    model: str | Path | None,
    text: str,
    *,
    base: str | Path | None = None,
    base_kv: CacheType | None = None,
    context: int = DEFAULT_CONTEXT,
    chunks: int | None = None,
    report: Report | None = None,
    **loading: Any,
) -> Evaluation:
    """Perplexity of `text` under a model, and its divergence from `base` if one is given.

    `base`: another model with the same vocabulary, or "llama.cpp": the same file there. `base_kv`: KV cache
    type of the base; without `base`, the model itself is the base. `chunks`: maximum number of windows.
    `loading`: further keywords of `edgeinfer.load`, for both; but the base's feed-forward is dense, and with
    `sparse` "exact" or "predicted" the scored tokens are processed in short steps. Memory is bounded by the
    models and a few slices of logits, whatever the length of the text.

    Raises `SettingError` for a text without a whole window, `EdgeInferError` for vocabularies that differ,
    and what `edgeinfer.load` raises.
    """
    with ExitStack() as stack:
        loaded = stack.enter_context(load(model, context=context, draft=None, **loading))
        source = EngineSource(loaded.engine, _step(loading))
        windows = text_windows(loaded.tokenizer, text, context, chunks)
        if base is None and base_kv is not None:
            base = loaded.name if model is None else model
        of_base = {**loading, "kv": base_kv or loading.get("kv") or "f16"}
        base_source = _base(stack, loaded, model, base, context, of_base) if base is not None else None
        scores = Scores.joined(list(scored_windows(source, base_source, windows, report)))
    return summarize(scores, len(windows), context)


def _step(loading: Mapping[str, Any]) -> int | None:
    """Tokens per forward: a sparse feed-forward requires short steps."""
    return SPARSE_TOKENS if loading.get("sparse") in ("exact", "predicted") else None


def text_windows(tokenizer: TextTokenizer, text: str, context: int, chunks: int | None) -> Windows:
    """The windows of a text, with BOS if the model uses it."""
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    return Windows(tokenizer.encode(text, bos=True), context, bos, chunks)


def scored_windows(
    source: LogitSource, base: LogitSource | None, windows: Windows, report: Report | None = None
) -> Iterator[Scores]:
    """Yield the scores of each slice."""
    for done, window in enumerate(windows):
        sources = [each for each in (source, base) if each is not None]
        for each in sources:
            each.begin()
            each.skip(window.ids[: window.first])
        for begin, end in window_slices(window, source.vocabulary_size):
            ids, targets = window.ids[begin:end], window.ids[begin + 1 : end + 1]
            logits = source.rows(ids)
            yield score(logits, targets, base.rows(ids) if base is not None else None)
        if report:
            report(done + 1, len(windows))


def _base(
    stack: ExitStack,
    loaded: Model,
    model: str | Path | None,
    base: str | Path,
    context: int,
    loading: Mapping[str, Any],
) -> LogitSource:
    if base == LLAMA_CPP:
        model_file = find_model(model)
        threads = loading.get("threads") or usable_cpus()
        peer = LlamaCppContext(model_file.path, context, threads, "--base llama.cpp", loading["kv"])
        stack.callback(peer.close)
        return _same_size(loaded, LlamaCppSource(peer), model_file.name)
    other = stack.enter_context(
        load(base, context=context, draft=None, **{**loading, "sparse": "off", "lora": ()})
    )
    mine, theirs = _texts(loaded), _texts(other)
    if mine != theirs:
        index = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        where = "" if index is None else f", and token {index} is {theirs[index]!r}, not {mine[index]!r}"
        raise EdgeInferError(
            f"{other.name}: its vocabulary of {len(theirs)} tokens isn't that of {loaded.name} "
            f"({len(mine)}){where}; distributions can be compared over one vocabulary only"
        )
    return _same_size(loaded, EngineSource(other.engine), other.name)


def _same_size(loaded: Model, base: LogitSource, name: str) -> LogitSource:
    """Check that files of one vocabulary have equal logit sizes: their padding may differ."""
    size = loaded.engine.vocabulary_size
    if base.vocabulary_size != size:
        raise EdgeInferError(f"{name}: {base.vocabulary_size} logits, wanted {size} as {loaded.name} has")
    return base


def _texts(model: Model) -> list[bytes]:
    tokenizer = model.tokenizer
    return [tokenizer.token_bytes(token) for token in range(tokenizer.vocabulary_size)]
