"""Loading what drafts for a model: a smaller one of the same vocabulary, or a look back at the text."""

from dataclasses import dataclass, replace

from edgeinfer.catalogue import ModelFile, find_model
from edgeinfer.description.model_config import ModelConfig
from edgeinfer.description.model_weights import embedding_rows
from edgeinfer.errors import EdgeInferError, OutOfMemoryError, SettingError
from edgeinfer.loading.cpu_loading import load_on_cpu
from edgeinfer.loading.model_source import ModelSource
from edgeinfer.loading.wishes import Wishes
from edgeinfer.speculation.draft_model import DraftModel
from edgeinfer.speculation.drafts import Drafter
from edgeinfer.speculation.prompt_lookup import PromptLookup
from edgeinfer.tokenizer import Tokenizer
from edgeinfer_quant_formats import GGUFFile

MOST_EXTRA_TOKENS = 1024
"""Tokens, padding most often, by which vocabularies of one family are seen to differ in length."""


@dataclass(frozen=True)
class LoadedDrafter:
    """What drafts, if anything does, and what the user should know of it."""

    drafter: Drafter | None
    notes: tuple[str, ...] = ()


def load_drafter(
    found: ModelFile, wishes: Wishes, target: Tokenizer, context: int, taken: int
) -> LoadedDrafter:
    """As wished: "auto" takes the catalogue's draft for the model, else looks back.

    `context`: tokens that the model's cache holds; `taken`: bytes of main memory that the model took of a
    budget.

    Raises:
        SettingError: the draft that was named can't follow this model.
        UnknownModelError: there is no such draft.
        OutOfMemoryError: the draft that was named doesn't fit beside the model.
    """
    if wishes.draft is None:
        return LoadedDrafter(None)
    if wishes.draft == "lookup":
        return LoadedDrafter(PromptLookup())
    if wishes.draft != "auto":
        return LoadedDrafter(_draft_model(find_model(wishes.draft), wishes, target, context, taken))
    if found.draft_path is None:
        return LoadedDrafter(PromptLookup())
    try:
        drafter = _draft_model(find_model(found.draft_path), wishes, target, context, taken)
    except (OutOfMemoryError, SettingError) as error:
        return LoadedDrafter(PromptLookup(), (f"drafting by looking back: {error}",))
    return LoadedDrafter(drafter)


def _draft_model(found: ModelFile, wishes: Wishes, target: Tokenizer, context: int, taken: int) -> DraftModel:
    file = GGUFFile.open(found.path)
    try:
        config = ModelConfig.from_metadata(file.metadata, embedding_rows(file))
        check_vocabularies(found.name, Tokenizer.from_metadata(file.metadata), target)
        room = None if wishes.ram is None else max(0, wishes.ram - taken)
        own = replace(wishes, context=context, ram=room, device="cpu", progress=None)
        loaded = load_on_cpu(ModelSource(found.name, file, config, own))
        return DraftModel(loaded.engine, target.vocabulary_size, loaded.ram_bytes, file.close)
    except BaseException as error:
        file.close()
        if isinstance(error, EdgeInferError) and not isinstance(error, OutOfMemoryError | SettingError):
            raise SettingError(f"draft: {found.name}: {error}") from error
        raise


def check_vocabularies(name: str, draft: Tokenizer, target: Tokenizer) -> None:
    """Raise `SettingError` unless both have the same tokens, but for some more at the end of one."""
    shared = min(draft.vocabulary_size, target.vocabulary_size)
    extra = max(draft.vocabulary_size, target.vocabulary_size) - shared
    if extra > MOST_EXTRA_TOKENS:
        raise SettingError(
            f"draft: {name} has {draft.vocabulary_size} tokens, the model {target.vocabulary_size}; wanted "
            "the same vocabulary, or --draft lookup"
        )
    for token_id in range(shared):
        if draft.token_bytes(token_id) != target.token_bytes(token_id):
            raise SettingError(
                f"draft: token {token_id} of {name} is {draft.token_bytes(token_id)!r}, that of the model "
                f"{target.token_bytes(token_id)!r}; wanted the same vocabulary, or --draft lookup"
            )
