"""The file of a draft model, opened and checked against its target model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from edgeinfer.errors import Detail, EdgeInferError, SettingError
from edgeinfer.hugging_face.opening import open_file
from edgeinfer.loading.draft_head_file import HeadFile, is_head_path
from edgeinfer.loading.draft_vocabulary import VocabularyMismatchError, check_vocabularies, same_tokens
from edgeinfer.loading.medusa_file import MedusaFile
from edgeinfer.model_config.config import ModelConfig
from edgeinfer.model_config.file_sizes import file_sizes
from edgeinfer.model_config.layers.medusa_heads import is_medusa_file
from edgeinfer.model_config.weights import has_head_layers, is_head_file, read_config
from edgeinfer.registry.draft_siblings import draft_siblings
from edgeinfer.registry.model_file import ModelFile
from edgeinfer.registry.registry import find_draft
from edgeinfer.speculation.drafter import Drafter
from edgeinfer.tokenizer import Tokenizer
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_quant_formats import GGUFFile

NO_MODELS = (None, "lookup", "self", "mtp")
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

    def close(self) -> None:
        self.file.close()


OpenDraft = DraftFile | HeadFile | MedusaFile


@dataclass(frozen=True)
class DraftTarget:
    """The model for which a draft is opened; `config` None: edgeinfer can't run it."""

    name: str
    file: GGUFFile
    config: ModelConfig | None
    draft_path: Path | None = None
    head_path: Path | None = None
    """The registry's draft model and draft head for it, if they are on this disk."""
    siblings: tuple[Path, ...] = ()
    """Files next to it that are named as drafts."""

    @classmethod
    def of(cls, model: ModelFile, file: GGUFFile, config: ModelConfig | None) -> Self:
        """A model on this disk."""
        siblings = tuple(draft_siblings(model.path))
        return cls(model.name, file, config, model.draft_path, model.head_path, siblings)

    @property
    def has_head(self) -> bool:
        """Whether the model's file has a draft head."""
        return self.config is not None and self.config.draft_heads > 0 and has_head_layers(self.file)

    def head(self, *, required: bool) -> HeadFile | MedusaFile | None:
        """The draft head in the model's file or next to it, else the registered one; None: there is none.

        Raises:
            SettingError: it can't be run.
        """
        return self._nearest_head(required=required) or self._registered_head(required=required)

    def _nearest_head(self, *, required: bool) -> HeadFile | MedusaFile | None:
        """The draft head in the model's file, else the first that fits of those next to it; None: there is
        none.

        Raises:
            SettingError: it can't be run, or none of those next to the file can.
        """
        if self.config is None or self.config.is_encoder:
            return None
        if self.has_head:
            return HeadFile.of(self.file, self.file, self.config, required=required)
        problems = list[str]()
        for path in self.siblings:
            try:
                return open_head(path, self.file, self.config, required=required)
            except SettingError as error:
                problems.append(str(error))
            except (EdgeInferError, OSError, ValueError) as error:
                problems.append(f"draft: {path.name}: {error}")
        if problems:
            raise SettingError(problems[0])
        return None

    def _registered_head(self, *, required: bool) -> HeadFile | MedusaFile | None:
        """The registry's draft head; None: there is none. Raises `SettingError`: it can't be run."""
        if self.config is None or self.config.is_encoder or self.head_path is None:
            return None
        return open_head(self.head_path, self.file, self.config, required=required)

    def named(self, draft: str | Path, *, required: bool) -> OpenDraft:
        """A draft model, or a file with a draft head, by name or path. Raises as `DraftFile.open`."""
        path = find_draft(draft).path
        if self.config is None or not is_head_path(path):
            return DraftFile.open(draft, self.file, required=required)
        return open_head(path, self.file, self.config, required=required)


def open_head(path: Path, target: GGUFFile, config: ModelConfig, *, required: bool) -> HeadFile | MedusaFile:
    """The head in a file that has no model, or the Medusa heads.

    Raises:
        SettingError: there is none, or it can't be run.
        VocabularyMismatchError: it drafts for another vocabulary.
    """
    file = open_file(path)
    try:
        if not is_head_file(file):
            raise SettingError(f"draft: {path.name} is no draft head")
        if "tokenizer.ggml.tokens" in file.metadata and not same_tokens(file.metadata, target.metadata):
            tokenizers = [Tokenizer.from_metadata(each.metadata) for each in (file, target)]
            check_vocabularies(path.name, *tokenizers)
        if is_medusa_file(file):
            return MedusaFile.of(file, target, config)
        return HeadFile.of(file, target, config, required=required)
    except BaseException:
        file.close()
        raise


def open_draft(
    requested: str | Drafter | None, target: DraftTarget
) -> tuple[OpenDraft | None, tuple[str, ...]]:
    """The draft for `target`: `requested`; with "auto" its draft head, else the draft model registered for
    it. If that can't be used, returns a warning, and prompt lookup is used instead.

    Raises:
        As `DraftFile.open`, for a draft that was requested by name.
    """
    if requested == "mtp":
        head = target.head(required=True)
        if head is None:
            raise SettingError(
                f"draft: 'mtp' needs a draft head (nextn tensors), which {target.name} doesn't have, nor is "
                "there an mtp-*.gguf next to it; take 'auto', 'lookup' or a draft model"
            )
        return head, ()
    if requested == "auto":
        return _automatic(target)
    if requested in NO_MODELS or isinstance(requested, Drafter):
        return None, ()
    assert requested is not None
    try:
        return target.named(requested, required=True), ()
    except VocabularyMismatchError as error:
        return None, (f"using prompt lookup instead of the draft model: {error}",)


def _automatic(target: DraftTarget) -> tuple[OpenDraft | None, tuple[str, ...]]:
    """As `open_draft` with "auto": a head, else the draft model."""
    warnings = list[str]()
    try:
        if head := target.head(required=False):
            return head, ()
    except SettingError as error:
        warnings.append(Detail(f"the draft head isn't used: {error}"))
    if target.draft_path is None:
        return None, tuple(warnings)
    try:
        return DraftFile.open(target.draft_path, target.file, required=False), tuple(warnings)
    except SettingError as error:
        warnings.append(Detail(f"using prompt lookup instead of the draft model: {error}"))
        return None, tuple(warnings)
