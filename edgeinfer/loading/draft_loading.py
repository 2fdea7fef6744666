"""Loads the drafter of a model: a smaller model with the same vocabulary, or prompt lookup."""

from dataclasses import dataclass, replace
from pathlib import Path

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import Detail, EdgeInferError, SettingError
from edgeinfer.loading.draft_file import DraftFile, OpenDraft
from edgeinfer.loading.draft_head_file import HeadFile
from edgeinfer.loading.engine_loading import load_draft_engine
from edgeinfer.loading.medusa_file import MedusaFile
from edgeinfer.loading.model_source import LoadedEngine, ModelSource
from edgeinfer.speculation.draft_model import DraftModel
from edgeinfer.speculation.draft_vocabulary import short_note
from edgeinfer.speculation.drafter import ChainedDrafter, Drafter
from edgeinfer.speculation.layer_skipping import LayerSkipping, kept_layers
from edgeinfer.speculation.prompt_lookup import PromptLookup
from edgeinfer.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadedDrafter:
    """The drafter, if any, and warnings for the user."""

    drafter: Drafter | None
    warnings: tuple[str, ...] = ()


def load_drafter(
    draft: OpenDraft | None, source: ModelSource, target: Tokenizer, loaded_target: LoadedEngine
) -> LoadedDrafter:
    """Load the requested drafter: the model in `draft` if the plan has memory for it, else prompt lookup.

    `source`, `target`: the target model and its tokenizer; `loaded_target`: the loaded target engine.

    Raises:
        SettingError: the requested drafter can't run with this model.
        OSError: a lookup file can't be read.
    """
    options = source.options
    if options.draft is None or isinstance(options.draft, Drafter):
        _check_hidden_layers(options.draft, loaded_target.engine)
        return LoadedDrafter(options.draft)
    lookup = PromptLookup([_read_lookup_file(path, target) for path in options.lookup_files])
    model: Drafter
    warnings: tuple[str, ...] = ()
    if options.draft == "self":
        model = _layer_skipping(loaded_target.engine)
    elif draft is None or loaded_target.placed.draft is None:
        return LoadedDrafter(lookup)
    else:
        try:
            model = (
                draft.load(source, loaded_target)
                if isinstance(draft, HeadFile | MedusaFile)
                else _draft_model(draft, source, target, loaded_target)
            )
        except SettingError as error:
            if draft.required or loaded_target.gpu is None:
                raise
            return LoadedDrafter(None, (f"drafting is off: {error}",))
        if not draft.required:
            memory = "GPU" if loaded_target.placed.has_gpu_head else "main"
            warnings = (Detail(f"drafting with {model.name}: {_cost(model.nbytes, memory)}"),)
        if model.short_vocabulary:
            warnings += (Detail(short_note(model.name, model.short_vocabulary)),)
    return LoadedDrafter(ChainedDrafter([lookup, model]) if options.lookup_files else model, warnings)


def _check_hidden_layers(drafter: Drafter | None, engine: NativeEngine) -> None:
    """Raise `SettingError` if a drafter reads hidden states that the engine doesn't hand out."""
    if drafter is not None and drafter.hidden_layers:
        engine.hand_out(drafter.hidden_layers, drafter.observe)


def _cost(nbytes: int, memory: str) -> str:
    return f"{nbytes / 1e6:.0f} MB of {memory} memory (draft=None leaves it out)"


def _layer_skipping(engine: NativeEngine) -> LayerSkipping:
    if engine.specification.is_recurrent:
        raise SettingError("draft: 'self' can't skip layers with a recurrent state; take 'lookup' or a model")
    if not engine.capabilities.skips_layers:
        raise SettingError("draft: 'self' runs on the CPU only; take 'lookup' or a model, or device='cpu'")
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
    draft: DraftFile, source: ModelSource, target: Tokenizer, loaded_target: LoadedEngine
) -> DraftModel:
    """The model in `draft` as a drafter, if the plan has memory for it."""
    sequences = draft.sizes.sequences_of_draft(source.context, loaded_target.placed.options.sequences)
    options = replace(
        source.options,
        context=source.context,
        device="cpu",
        split="auto",
        vram=None,
        progress=None,
        lora=(),
        parallel=sequences,
    )
    own = ModelSource(draft.name, draft.file, draft.config, options, draft.sizes)
    try:
        loaded = load_draft_engine(own, loaded_target)
    except EdgeInferError as error:
        raise SettingError(f"draft: {draft.name}: {error}") from error
    return DraftModel(
        loaded.engine,
        target.vocabulary_size,
        loaded.plan().own_gpu_bytes if loaded.gpu else loaded.plan().bytes_on("cpu"),
        draft.file.close,
        tree_width=1 + options.draft_tree_width,
        name=draft.name,
    )
