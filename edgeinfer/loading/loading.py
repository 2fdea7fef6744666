"""Model loading: find the file, select the device, load an engine."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from edgeinfer.chat_templates.chat_format import ChatFormat
from edgeinfer.embedding import pooling_of
from edgeinfer.errors import (
    EdgeInferError,
    KernelError,
    OutOfMemoryError,
    SettingError,
    UnsupportedModelError,
    shown,
)
from edgeinfer.hugging_face.folder_file import FolderFile
from edgeinfer.hugging_face.powerinfer_file import PowerInferFile
from edgeinfer.loading.activity_counting import begin_counting, closing
from edgeinfer.loading.draft_file import DraftTarget, OpenDraft, open_draft
from edgeinfer.loading.draft_loading import LoadedDrafter, load_drafter
from edgeinfer.loading.drafting_costs import begin_drafting
from edgeinfer.loading.engine_loading import load_engine
from edgeinfer.loading.model_source import LoadedEngine, ModelSource
from edgeinfer.lora.model_lora import ModelLora
from edgeinfer.model import Model
from edgeinfer.model_config.config import ModelConfig
from edgeinfer.model_config.pooling_head import read_pooling_head
from edgeinfer.model_config.support import open_model
from edgeinfer.model_config.weights import read_config
from edgeinfer.options import EndpointKeywords, LoadKeywords, LoadOptions
from edgeinfer.ranking import ranker_of
from edgeinfer.registry.registry import ModelFile, find_model
from edgeinfer.tokenizer import Tokenizer
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.cpu.bus_error import explain_bus_errors
from edgeinfer_kernels.cpu.compiler.features import UnsupportedProcessorError, choose
from edgeinfer_kernels.cpu.compiler.kernel_cache import KernelBuildError, source_digest
from edgeinfer_kernels.cpu.layout.packed_matrix import UnsupportedFormatError
from edgeinfer_kernels.system.processor import usable_cpus
from edgeinfer_offload.machine.measure import stored_draft_figures
from edgeinfer_quant_formats import GGUFFile

if TYPE_CHECKING:
    from edgeinfer.endpoint.remote_model import RemoteModel


@overload
def load(model: str | None = None, **options: Unpack[EndpointKeywords]) -> "RemoteModel": ...


@overload
def load(model: str | Path | None = None, **options: Unpack[LoadKeywords]) -> Model: ...


def load(model: str | Path | None = None, **options: Any) -> "Model | RemoteModel":
    """Load a model: a name in the model registry, a path to a .gguf file, or None for the built-in one. With
    engine "openai", the name that a server has for it.

    `options`: the fields of `edgeinfer.options.LoadOptions`, which describes them.

    Raises:
        UnknownModelError: no such name or file; NotPulledError: a name whose files aren't downloaded yet.
        UnsupportedModelError: edgeinfer doesn't support the file; the text has a workaround.
        OutOfMemoryError: it doesn't fit; the text has both numbers and a context that would.
        SettingError: an option out of its range.
        ChatTemplateError: `chat_template`, or the file's choice of one, is invalid.
        KernelError: this machine can't build or run the kernels.
        EndpointError: the server can't be reached, or refuses the key.
        FormatError: a damaged file.
        OSError: the file can't be opened, or the folder of compiled kernels can't be written.
    """
    if not isinstance(model, str | Path | None):
        raise SettingError(f"model: saw {shown(model)}, wanted a name, a path, or None")
    load_options = LoadOptions.from_keywords(options)
    if load_options.engine == "openai":
        from edgeinfer.endpoint.remote_model import open_endpoint

        return open_endpoint(None if model is None else str(model), load_options)
    explain_bus_errors()
    model_file = find_model(model)
    model_file.record_use()
    if load_options.engine == "llama.cpp":
        from edgeinfer.llama_cpp.engine import load_llama_cpp

        return load_llama_cpp(model_file, load_options)
    file = open_model(model_file.path, model_file.name)
    try:
        if isinstance(file, FolderFile | PowerInferFile):
            file.prepare(load_options.progress)
        return _load_own(model_file, file, load_options)
    except BaseException as error:
        file.close()
        user_error = _explained(error, model_file.name)
        if user_error is None:
            raise
        raise user_error from error


def _explained(error: BaseException, name: str) -> EdgeInferError | None:
    """The user-facing error for an exception of a lower layer; None: the exception is clear by itself."""
    if isinstance(error, UnsupportedFormatError):
        return UnsupportedModelError(f"{error}; llama.cpp may run it: add engine='llama.cpp'")
    if isinstance(error, UnsupportedProcessorError | KernelBuildError):
        return KernelError(str(error))
    if isinstance(error, MemoryError):
        return OutOfMemoryError(f"{name}: out of memory; close programs, or take a smaller context or model")
    return None


def _load_own(model_file: ModelFile, file: GGUFFile, options: LoadOptions) -> Model:
    config = read_config(file)
    source = ModelSource(model_file.name, file, config, options)
    tokenizer = read_tokenizer(file, config, options.assume_pre_tokenizer)
    chat_format = _chat_format(file, tokenizer, options.chat_template)
    head = read_pooling_head(file, config)
    drafts_from = None if config.is_encoder else options.draft
    draft, draft_warnings = open_draft(drafts_from, DraftTarget.of(model_file, file, config))
    warnings = [*tokenizer.warnings, *_context_warnings(config, source.context), *draft_warnings]
    loaded = None
    try:
        loaded = load_engine(source, draft.sizes if draft else None)
        adapters = ModelLora(source, loaded.engine)
        adapters.use(source.adapters)
        drafting = _drafting(draft, loaded, tokenizer, source)
    except BaseException:
        if loaded is not None:
            loaded.engine.close()
        if draft is not None:
            draft.close()
        raise
    if draft is not None and loaded.placed.draft is None:
        draft.close()
    counts = begin_counting(source, loaded)
    model = Model(
        name=model_file.name,
        engine=loaded.engine,
        tokenizer=tokenizer,
        chat_format=chat_format,
        plan=loaded.plan,
        prompt_style=model_file.prompt_style,
        warnings=[*warnings, *loaded.warnings, *drafting.warnings],
        on_close=closing(file.close, counts),
        drafter=drafting.drafter,
        snapshots=adapters.snapshot_store() if options.snapshots and not config.is_encoder else None,
        spare_core=_has_spare_core(loaded),
        batch_invariant=loaded.thread_pool is not None,
        template_options=source.options.template_options.over(model_file.template_options),
        sampling=model_file.sampling,
        gpu=loaded.gpu.index if loaded.gpu else None,
        adapters=adapters,
        pooling=pooling_of(file.metadata.get(f"{config.architecture}.pooling_type")),
        pooling_head=head,
        ranker=ranker_of(file.metadata, tokenizer, config, head),
    )
    _begin_drafting(model, loaded, source)
    return model


def _has_spare_core(loaded: LoadedEngine) -> bool:
    """Whether a core is idle while the engine computes."""
    if loaded.thread_pool is None:
        return loaded.placed.device == "gpu"
    return loaded.thread_pool.threads < usable_cpus()


def _begin_drafting(model: Model, loaded: LoadedEngine, source: ModelSource) -> None:
    """Drafting costs are stored where they are the same at each start: on the CPU, with any budget."""
    if model.speculator is None:
        return
    if loaded.thread_pool is None:
        model.speculator.begin(model.speculator.measure(), {})
        return
    options, drafter = source.options, model.speculator.drafter
    of = (source.file.path.name, source.file.path.stat().st_size, drafter.name, options.draft_tree_width)
    how = (loaded.thread_pool.threads, options.kv, options.repack, options.sparse)
    short = (drafter.short_vocabulary,) if drafter.short_vocabulary else ()
    kernels = source_digest(choose(options.instruction_set))
    figures = stored_draft_figures(user_folder("cache"))
    begin_drafting(model.speculator, figures, " ".join(map(str, (*of, *how, *short, kernels))))


def _drafting(
    draft: OpenDraft | None, loaded: LoadedEngine, tokenizer: Tokenizer, source: ModelSource
) -> LoadedDrafter:
    """The drafter for the engine."""
    if source.specification.is_encoder:
        return LoadedDrafter(None)
    drafts = source.options.drafts_on_gpu(has_head=loaded.placed.has_gpu_head)
    if loaded.gpu is not None and not drafts:
        return LoadedDrafter(None)
    return load_drafter(draft, source, tokenizer, loaded)


def read_tokenizer(file: GGUFFile, config: ModelConfig, assumed: str | None = None) -> Tokenizer:
    """The file's tokenizer, which must have a token for every row of the embedding."""
    tokenizer = Tokenizer.from_metadata(file.metadata, assumed)
    if tokenizer.vocabulary_size != config.vocabulary_size:
        raise UnsupportedModelError(
            f"token_embd.weight: {config.vocabulary_size} rows, wanted one for each of the "
            f"{tokenizer.vocabulary_size} tokens"
        )
    return tokenizer


def _chat_format(file: GGUFFile, tokenizer: Tokenizer, given: str | None) -> ChatFormat | None:
    """The chat template of the file, or `given`; None if there is none."""
    metadata = dict(file.metadata)
    if given is not None:
        metadata["tokenizer.chat_template"] = given
    chat_format = ChatFormat.from_metadata(metadata, tokenizer)
    return chat_format if chat_format.template_source is not None else None


def _context_warnings(config: ModelConfig, context: int) -> list[str]:
    if context <= config.trained_context:
        return []
    return [
        f"the context of {context} is longer than the {config.trained_context} that the model was trained "
        "for; expect worse output beyond"
    ]
