"""The file of a draft model, opened and checked against its target model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from edgeinfer.errors import Detail, EdgeInferError, SettingError
from edgeinfer.hugging_face.opening import open_file
from edgeinfer.loading.draft_vocabulary import VocabularyMismatchError, check_vocabularies, same_tokens
from edgeinfer.model_config.config import ModelConfig
from edgeinfer.model_config.file_sizes import file_sizes
from edgeinfer.model_config.weights import read_config
from edgeinfer.registry.registry import find_draft
from edgeinfer.speculation.drafter import Drafter
from edgeinfer.tokenizer import Tokenizer
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_quant_formats import GGUFFile

NO_MODELS = (None, "lookup", "self")
"""Values of `draft` that aren't model names."""


@dataclass(frozen=True)
class DraftFile:
    """An open draft model; `required`: it was requested by name. Close `file` when done."""

    name: str
    file: GGUFFile
    config: ModelConfig
    sizes: ModelSizes
    required: bool

    @classmethod
    def open(cls, draft: str | Path, target: GGUFFile, *, required: bool) -> Self:
        """Open a draft model by name or path for the model in `target`.

        Raises:
            VocabularyMismatchError: its vocabulary differs from the target's.
            SettingError: it can't be run.
            UnknownModelError, FormatError, OSError: there is no such model, or it can't be read.
        """
        model_file = find_draft(draft)
        file = open_file(model_file.path)
        try:
            if not same_tokens(file.metadata, target.metadata):
                tokenizers = [Tokenizer.from_metadata(each.metadata) for each in (file, target)]
                check_vocabularies(model_file.name, *tokenizers)
            config = read_config(file)
            if config.is_encoder:
                raise SettingError(f"draft: {model_file.name} is an encoder, which completes no text")
            return cls(model_file.name, file, config, file_sizes(file, config), required)
        except BaseException as error:
            file.close()
            if isinstance(error, EdgeInferError) and not isinstance(error, SettingError):
                raise SettingError(f"draft: {model_file.name}: {error}") from error
            raise


def open_draft(
    requested: str | Drafter | None, registered: Path | None, target: GGUFFile
) -> tuple[DraftFile | None, tuple[str, ...]]:
    """The draft model for `target`: `requested`, or with "auto" the one `registered` for it. If its
    vocabulary differs, returns a warning, and prompt lookup is used instead.

    Raises:
        As `DraftFile.open`, for a draft that was requested by name.
    """
    named = registered if requested == "auto" else requested
    if named in NO_MODELS or isinstance(named, Drafter):
        return None, ()
    assert named is not None
    try:
        return DraftFile.open(named, target, required=requested != "auto"), ()
    except (VocabularyMismatchError, SettingError) as error:
        message = f"using prompt lookup instead of the draft model: {error}"
        if requested == "auto":
            return None, (Detail(message),)
        if isinstance(error, VocabularyMismatchError):
            return None, (message,)
        raise
