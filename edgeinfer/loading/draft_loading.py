"""Loading what drafts for a model: a smaller one of the same vocabulary, or a look back at the text."""

from dataclasses import dataclass, replace
from pathlib import Path

from edgeinfer.catalogue import ModelFile, find_draft
from edgeinfer.description.model_config import ModelConfig
from edgeinfer.description.model_weights import embedding_rows
from edgeinfer.errors import EdgeInferError, OutOfMemoryError, SettingError
from edgeinfer.loading.cpu_loading import load_on_cpu
from edgeinfer.loading.draft_vocabulary import OtherVocabularyError, check_vocabularies, same_tokens
from edgeinfer.loading.gpu_choice import GpuUnavailableError
from edgeinfer.loading.model_source import LoadedEngine, ModelSource
from edgeinfer.speculation.draft_model import DraftModel
from edgeinfer.speculation.drafts import Drafter
from edgeinfer.speculation.first_of import FirstOf
from edgeinfer.speculation.layer_skipping import LayerSkipping, kept_layers
from edgeinfer.speculation.prompt_lookup import PromptLookup
from edgeinfer.tokenizer import Tokenizer
from edgeinfer.transformer import Transformer
from edgeinfer_kernels.backend import LayeredBackend
from edgeinfer_offload.memory_plan import MemoryPlan
from edgeinfer_offload.plan_facts import DRAFT, Place, PlannedItem
from edgeinfer_quant_formats import GGUFFile


@dataclass(frozen=True)
class LoadedDrafter:
    """What drafts, if anything does, and what the user should know of it."""

    drafter: Drafter | None
    notes: tuple[str, ...] = ()
    item: PlannedItem | None = None
    """Where a model that drafts lies."""

    def beside(self, plan: MemoryPlan) -> MemoryPlan:
        """The plan of the model that it drafts for, and the draft's bytes. Its time isn't in it."""
        if self.item is None:
            return plan
        place: Place = "gpu" if self.item.device == "gpu" else "cpu"
        if plan.draft == place:
            return plan
        others = (item for item in plan.items if item.item != DRAFT)
        return replace(plan, items=(*others, self.item), draft=place)


def load_drafter(
    found: ModelFile, source: ModelSource, target: Tokenizer, beside: LoadedEngine
) -> LoadedDrafter:
    """As wished: "auto" takes the catalogue's draft for the model `found`, else looks back. So does whatever
    has another vocabulary, with a note.

    `source`, `target`: the model and its tokenizer; `beside`: as it has been loaded.

    Raises:
        SettingError: the draft that was named can't follow this model.
        UnknownModelError: there is no such draft.
        OutOfMemoryError: the draft that was named doesn't fit beside the model.
        OSError: a reference can't be read.
    """
    wishes = source.wishes
    if wishes.draft is None:
        return LoadedDrafter(None)
    lookup = PromptLookup([_read_reference(path, target) for path in wishes.references])
    if wishes.draft == "lookup":
        return LoadedDrafter(lookup)
    model: Drafter
    item = None
    if wishes.draft == "self":
        model = _layer_skipping(beside.engine)
    else:
        wished = found.draft_path if wishes.draft == "auto" else wishes.draft
        if wished is None:
            return LoadedDrafter(lookup)
        try:
            model, item = _draft_model(find_draft(wished), source, target, beside)
        except (OutOfMemoryError, SettingError) as error:
            if wishes.draft != "auto" and not isinstance(error, OtherVocabularyError):
                raise
            return LoadedDrafter(lookup, (f"drafting by looking back: {error}",))
    notes = () if wishes.draft != "auto" else (f"drafting with {model.name}: {_cost(model.nbytes)}",)
    return LoadedDrafter(FirstOf([lookup, model]) if wishes.references else model, notes, item)


def _cost(nbytes: int) -> str:
    return f"{nbytes / 1e6:.0f} MB of main memory (--draft none, draft=None leave it out)"


def _layer_skipping(engine: Transformer) -> LayerSkipping:
    if not isinstance(engine.backend, LayeredBackend):
        raise SettingError("draft: 'self' runs on the CPU only; take 'lookup' or a model, or --device cpu")
    return LayerSkipping(engine, kept_layers(len(engine.specification.layers)))


def _read_reference(path: Path, tokenizer: Tokenizer) -> list[int]:
    """The ids of a text file.

    Raises:
        SettingError: it isn't text.
        OSError: it can't be read.
    """
    try:
        return tokenizer.encode(path.expanduser().read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise SettingError(
            f"references: byte {error.start} of {path} isn't UTF-8, wanted a text file"
        ) from error


def _draft_model(
    found: ModelFile, source: ModelSource, target: Tokenizer, beside: LoadedEngine
) -> tuple[DraftModel, PlannedItem]:
    """A model that drafts, and where it lies."""
    wishes, file = source.wishes, GGUFFile.open(found.path)
    try:
        config = ModelConfig.from_metadata(file.metadata, embedding_rows(file))
        if not same_tokens(file.metadata, source.file.metadata):
            check_vocabularies(found.name, Tokenizer.from_metadata(file.metadata), target)
        ram = None if wishes.ram is None else max(0, wishes.ram - beside.ram_bytes)
        vram = beside.room.nbytes if beside.room else 0
        own = replace(wishes, context=source.context, ram=ram, vram=vram, device="cpu", progress=None)
        loaded = _load_beside(ModelSource(found.name, file, config, own), beside)
        place: Place = "gpu" if loaded.on_gpu else "cpu"
        nbytes = loaded.plan().own_gpu_bytes if loaded.on_gpu else loaded.ram_bytes
        model = DraftModel(
            loaded.engine,
            target.vocabulary_size,
            nbytes,
            file.close,
            leaves=wishes.draft_leaves,
            name=found.name,
        )
        return model, PlannedItem(DRAFT, place, nbytes, 0.0, overlapped=True)
    except BaseException as error:
        file.close()
        if isinstance(error, EdgeInferError) and not isinstance(error, OutOfMemoryError | SettingError):
            raise SettingError(f"draft: {found.name}: {error}") from error
        raise


def _load_beside(draft: ModelSource, beside: LoadedEngine) -> LoadedEngine:
    """On the model's GPU, if that has room for it; else on the CPU."""
    if beside.room is not None:
        from edgeinfer.loading.gpu_loading import load_on_gpu

        room = beside.room
        try:
            return load_on_gpu(draft, room.gpu, room.nbytes if room.kept else None)
        except GpuUnavailableError:
            pass
    return load_on_cpu(draft, beside.team, disk=False)
