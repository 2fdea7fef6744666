"""Loads the drafter of a model: a smaller model with the same vocabulary, or prompt lookup."""

from dataclasses import dataclass, replace
from pathlib import Path

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import EdgeInferError, SettingError
from edgeinfer.loading.cpu_loading import load_draft_on_cpu
from edgeinfer.loading.draft_file import DraftFile
from edgeinfer.loading.model_source import LoadedEngine, ModelSource
from edgeinfer.planning.gpu_choice import GpuUnavailableError
from edgeinfer.speculation.draft_model import DraftModel
from edgeinfer.speculation.drafter import ChainedDrafter, Drafter
from edgeinfer.speculation.layer_skipping import LayerSkipping, kept_layers
from edgeinfer.speculation.prompt_lookup import PromptLookup
from edgeinfer.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadedDrafter:
    """The drafter, if any, and warnings for the user."""

    drafter: Drafter | None
    notes: tuple[str, ...] = ()


def load_drafter(
    draft: DraftFile | None, source: ModelSource, target: Tokenizer, beside: LoadedEngine
) -> LoadedDrafter:
    """Load the requested drafter: the model in `draft` if the plan has memory for it, else prompt lookup.

    `source`, `target`: the target model and its tokenizer; `beside`: the loaded target engine.

    Raises:
        SettingError: the requested drafter can't run with this model.
        OSError: a lookup file can't be read.
    """
    wishes = source.wishes
    if wishes.draft is None or isinstance(wishes.draft, Drafter):
        return LoadedDrafter(wishes.draft)
    lookup = PromptLookup([_read_lookup_file(path, target) for path in wishes.lookup_files])
    model: Drafter
    notes: tuple[str, ...] = ()
    if wishes.draft == "self":
        model = _layer_skipping(beside.engine)
    elif draft is None or beside.draft is None:
        return LoadedDrafter(lookup)
    else:
        model = _draft_model(draft, source, target, beside)
        if not draft.required:
            notes = (f"drafting with {model.name}: {_cost(model.nbytes)}",)
    return LoadedDrafter(ChainedDrafter([lookup, model]) if wishes.lookup_files else model, notes)


def _cost(nbytes: int) -> str:
    return f"{nbytes / 1e6:.0f} MB of main memory (--draft none, draft=None leave it out)"


def _layer_skipping(engine: NativeEngine) -> LayerSkipping:
    if not engine.capabilities.skips_layers:
        raise SettingError("draft: 'self' runs on the CPU only; take 'lookup' or a model, or --device cpu")
    return LayerSkipping(engine, kept_layers(len(engine.specification.layers)))


def _read_lookup_file(path: Path, tokenizer: Tokenizer) -> list[int]:
    """The ids of a text file.

    Raises:
        SettingError: it isn't text.
        OSError: it can't be read.
    """
    try:
        return tokenizer.encode(path.expanduser().read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise SettingError(
            f"lookup_files: byte {error.start} of {path} isn't UTF-8, wanted a text file"
        ) from error


def _draft_model(
    draft: DraftFile, source: ModelSource, target: Tokenizer, beside: LoadedEngine
) -> DraftModel:
    """The model in `draft` as a drafter, if the plan has memory for it."""
    wishes = replace(source.wishes, context=source.context, device="cpu", progress=None)
    own = ModelSource(draft.name, draft.file, draft.config, wishes)
    try:
        loaded = _load_beside(own, beside)
    except EdgeInferError as error:
        raise SettingError(f"draft: {draft.name}: {error}") from error
    return DraftModel(
        loaded.engine,
        target.vocabulary_size,
        loaded.plan().own_gpu_bytes if loaded.gpu else loaded.plan().bytes_on("cpu"),
        draft.file.close,
        siblings=wishes.draft_tree_width,
        name=draft.name,
    )


def _load_beside(draft: ModelSource, beside: LoadedEngine) -> LoadedEngine:
    """Load on the target's GPU if planned so; else on the CPU."""
    if beside.draft == "gpu" and beside.gpu is not None:
        from edgeinfer.loading.gpu_loading import load_draft_on_gpu

        try:
            return load_draft_on_gpu(draft, beside.gpu, beside.draft_gpu_bytes)
        except GpuUnavailableError:
            pass
    return load_draft_on_cpu(draft, beside.pool, beside.threads)
