"""The sizes of a model that is to draft, from its file's metadata: what plans are made with."""

from pathlib import Path

from edgeinfer.catalogue import ModelFile, find_draft
from edgeinfer.description.file_sizes import file_sizes
from edgeinfer.description.model_config import ModelConfig
from edgeinfer.description.model_weights import embedding_rows
from edgeinfer.errors import UnsupportedModelError
from edgeinfer.loading.draft_vocabulary import OtherVocabularyError, check_vocabularies, same_tokens
from edgeinfer.tokenizer import Tokenizer
from edgeinfer_kernels.model_sizes import ModelSizes
from edgeinfer_quant_formats import GGUFFile


def draft_sizes(wished: str | Path | None, file: GGUFFile) -> tuple[ModelSizes | None, list[str]]:
    """The sizes of a model that drafts for the one in `file`; none, and a remark, if it has another
    vocabulary, as in loading.
    """
    if wished in (None, "lookup", "self"):
        return None, []
    try:
        return _sizes(find_draft(wished), file), []
    except OtherVocabularyError as error:
        return None, [f"drafting by looking back: {error}"]


def _sizes(draft: ModelFile, file: GGUFFile) -> ModelSizes:
    with GGUFFile.open(draft.path) as own:
        if not same_tokens(own.metadata, file.metadata):
            tokenizers = [Tokenizer.from_metadata(one.metadata) for one in (own, file)]
            check_vocabularies(draft.name, *tokenizers)
        return file_sizes(own, config_or_remark(own)[0])


def config_or_remark(file: GGUFFile) -> tuple[ModelConfig | None, list[str]]:
    """The model's configuration; None, with a remark, for one that can be planned and not yet run."""
    try:
        return ModelConfig.from_metadata(file.metadata, embedding_rows(file)), []
    except UnsupportedModelError as error:
        return None, [f"edgeinfer can't run this model yet: {error}"]
