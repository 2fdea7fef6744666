"""llama.cpp as engine for models that edgeinfer doesn't support, through llama-cpp-python."""

import ctypes
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.chat_templates.chat_format import ChatFormat
from edgeinfer.engine.protocols import BasicEngine, PromptSteps
from edgeinfer.errors import Detail, EdgeInferError, UnsupportedModelError
from edgeinfer.llama_cpp.library import (
    LlamaCppCacheType,
    llama_cpp_cache_type,
    llama_cpp_library,
    log_catcher,
)
from edgeinfer.model import Model
from edgeinfer.options import LoadOptions
from edgeinfer.registry.registry import ModelFile
from edgeinfer.sampling import Sampler
from edgeinfer.snapshots.snapshot_file import Snapshot
from edgeinfer.tokenizer.detokenizer import StreamDecoder
from edgeinfer.tokenizer.reasoning_marks import TOKEN_TEXTS
from edgeinfer.tokenizer.special_texts import ALWAYS_SHOWN
from edgeinfer.tokenizer.special_tokens import SpecialSplitter, SpecialToken
from edgeinfer_kernels.capabilities import Capabilities
from edgeinfer_quant_formats import GGUFFile
from edgeinfer_quant_formats.errors import FormatError

BATCH = 256
DEFAULT_CONTEXT = 4096


class LlamaCppTokenizer:
    """llama.cpp's tokenizer, of any type."""

    def __init__(self, llama: Any, library: Any) -> None:
        self._llama = llama
        self._library = library
        self._vocabulary = library.llama_model_get_vocab(llama.model)
        self.vocabulary_size: int = llama.n_vocab()
        self.bos_id = self._id(library.llama_vocab_bos)
        self.eos_id = self._id(library.llama_vocab_eos)
        self.add_bos = bool(library.llama_vocab_get_add_bos(self._vocabulary))
        self.end_ids = frozenset(
            token
            for token in range(self.vocabulary_size)
            if library.llama_vocab_is_eog(self._vocabulary, token)
        )

    def _id(self, question: Any) -> int | None:
        token_id = int(question(self._vocabulary))
        return token_id if token_id >= 0 else None

    def encode(
        self,
        text: str,
        *,
        bos: bool = False,
        special: bool = False,
        restore: Callable[[str], str] | None = None,
    ) -> list[int]:
        """Ids of a text, as `Tokenizer.encode`."""
        if restore is None or restore(text) == text:
            return self._tokenized(text, bos, special)
        ids = self._tokenized("", bos, special)
        for part in self._special.split(text):
            ids += [part] if isinstance(part, int) else self._tokenized(restore(part), False, False)
        return ids

    def _tokenized(self, text: str, bos: bool, special: bool) -> list[int]:
        ids: list[int] = self._llama.tokenize(text.encode("utf-8", "replace"), add_bos=bos, special=special)
        return ids

    @cached_property
    def _special(self) -> SpecialSplitter:
        """The control and user-defined tokens."""
        library = self._library
        attributes = library.LLAMA_TOKEN_ATTR_CONTROL | library.LLAMA_TOKEN_ATTR_USER_DEFINED
        attributes |= library.LLAMA_TOKEN_ATTR_UNKNOWN
        return SpecialSplitter(
            [
                SpecialToken(token, self.token_bytes(token).decode("utf-8", "replace"))
                for token in range(self.vocabulary_size)
                if self._library.llama_vocab_get_attr(self._vocabulary, token) & attributes
            ]
        )

    @cached_property
    def control_texts(self) -> tuple[str, ...]:
        """The texts of control tokens, and of those that mark roles and reasoning."""
        marks = {*ALWAYS_SHOWN, *TOKEN_TEXTS}
        return tuple(
            token.text
            for token in self._special.tokens
            if token.text in marks or self._is_hidden(token.token_id)
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; for a special token its name."""
        return self._piece(token_id, special=True)

    def is_control(self, token_id: int) -> bool:
        """Whether a token is omitted from text."""
        return bool(self._library.llama_vocab_is_control(self._vocabulary, token_id))

    def _is_hidden(self, token_id: int) -> bool:
        attributes = self._library.LLAMA_TOKEN_ATTR_CONTROL | self._library.LLAMA_TOKEN_ATTR_UNKNOWN
        return bool(self._library.llama_vocab_get_attr(self._vocabulary, token_id) & attributes)

    def _piece(self, token_id: int, special: bool) -> bytes:
        convert = self._library.llama_token_to_piece
        return _filled(lambda buffer, size: convert(self._vocabulary, token_id, buffer, size, 0, special))

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ids, as `Tokenizer.decode`."""
        pieces: list[bytes] = []
        # llama.cpp removes the prefix space only at the beginning of a run, so each run is decoded
        # separately.
        for hidden, run in groupby(ids, key=self.is_control):
            if not hidden:
                pieces.append(self._run(list(run)))
            elif special:
                pieces += [self.token_bytes(token) for token in run]
        return b"".join(pieces).decode("utf-8", "replace")

    def _run(self, ids: list[int]) -> bytes:
        """The bytes of tokens without control tokens."""
        given = (ctypes.c_int32 * len(ids))(*ids)
        convert = self._library.llama_detokenize
        return _filled(
            lambda buffer, size: convert(self._vocabulary, given, len(ids), buffer, size, False, False)
        )

    def stream_decoder(self) -> StreamDecoder:
        """Decoder for streamed ids."""
        return StreamDecoder(lambda token_id: self._piece(token_id, special=False))


def _filled(convert: Any) -> bytes:
    """The bytes that `convert(buffer, size)` writes; it returns their number, or minus the number needed."""
    size = 64
    while True:
        buffer = ctypes.create_string_buffer(size)
        count = int(convert(buffer, size))
        if count >= 0:
            return bytes(buffer.raw[:count])
        size = -count


class LlamaCppEngine(BasicEngine):
    """The engine protocol over llama.cpp: llama.cpp computes logits, edgeinfer samples."""

    capabilities = Capabilities(unevictable="the cache of llama.cpp")

    def __init__(self, llama: Any, context: int, bytes_per_token: int) -> None:
        self._llama = llama
        self._held = 0
        self._closed = False
        self.bytes_per_token = bytes_per_token
        self.ids: list[int] = []
        self.context = context
        self.largest_context: int = max(context, llama._model.n_ctx_train())
        self.vocabulary_size: int = llama.n_vocab()

    def prompt_steps(self, ids: Sequence[int], limit: int | None = None) -> PromptSteps:
        """As the protocol specifies."""
        self._catch_up()
        size = min(limit or BATCH, BATCH)
        for first in range(0, len(ids), size):
            last = self._read(ids[first : first + size])
            yield min(first + size, len(ids))
        logits: npt.NDArray[np.float32] = last[0]
        return logits

    def append_all(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """As the protocol specifies."""
        self._catch_up()
        steps = range(0, len(ids), BATCH)
        return np.concatenate([self._read(ids[first : first + BATCH], every=True) for first in steps])

    def _catch_up(self) -> None:
        """Prefill again the tokens that a model without rewind had to drop."""
        if self._closed:
            raise EdgeInferError("the model has been closed; load it again")
        known, self.ids = self.ids, self.ids[: self._held]
        for first in range(self._held, len(known), BATCH):
            self._read(known[first : first + BATCH])

    def _read(self, ids: Sequence[int], every: bool = False) -> npt.NDArray[np.float32]:
        """One forward; logits (tokens, vocabulary) with `every`, else (1, vocabulary) after the last
        token.
        """
        context, batch = self._llama._ctx, self._llama._batch
        context.kv_cache_seq_rm(0, self._held, -1)
        batch.set_batch(batch=ids, n_past=self._held, logits_all=every)
        context.decode(batch)
        self.ids.extend(ids)
        self._held += len(ids)
        pointer = context.get_logits() if every else context.get_logits_ith(-1)
        shape = len(ids) if every else 1, self.vocabulary_size
        return np.ctypeslib.as_array(pointer, shape=shape).astype(np.float32)

    def rows(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """As the protocol specifies."""
        raise EdgeInferError("embeddings: the engine llama.cpp doesn't support them here")

    def snapshot(self) -> None:
        """Not supported for llama.cpp's KV cache."""

    def restore(self, snapshot: Snapshot, length: int) -> None:
        """As the protocol specifies."""
        raise ValueError("llama.cpp's cache takes no snapshot")

    def device_sampler(self, sampler: Sampler) -> None:
        """None: logits are copied to the host, and sampling happens there."""

    def rewind(self, length: int) -> None:
        """Truncate the KV cache to the first `length` tokens. Recurrent models prefill them again later."""
        del self.ids[length:]
        if length < self._held:
            self._held = length if self._llama._ctx.kv_cache_seq_rm(0, length, -1) else 0
            if not self._held:
                self._llama._ctx.kv_cache_clear()

    def close(self) -> None:
        """Free llama.cpp's model."""
        self._closed = True
        self._llama.close()


def load_llama_cpp(model_file: ModelFile, options: LoadOptions) -> Model:
    """Load a file with llama.cpp.

    Raises:
        EdgeInferError: llama-cpp-python isn't installed.
        UnsupportedModelError: llama.cpp refuses the file; the text gives the reason.
    """
    if model_file.path.is_dir():
        raise UnsupportedModelError(
            f"{model_file.name}: llama.cpp reads GGUF files only; convert the folder first: edgeinfer convert"
        )
    llama_cpp = llama_cpp_library("--engine llama.cpp")
    context = options.context or min(_trained_context(model_file), DEFAULT_CONTEXT)
    llama = _opened(llama_cpp, model_file, context, options.threads, llama_cpp_cache_type(options.kv))
    tokenizer = LlamaCppTokenizer(llama, llama_cpp)
    template = options.chat_template or llama.metadata.get("tokenizer.chat_template")
    texts = {
        name: None if token is None else tokenizer.token_bytes(token).decode("utf-8", "replace")
        for name, token in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id))
    }
    return Model(
        name=model_file.name,
        engine=LlamaCppEngine(llama, context, model_file.size_bytes),
        tokenizer=tokenizer,
        chat_format=ChatFormat(template, texts["bos"], texts["eos"]) if template else None,
        prompt_style=model_file.prompt_style,
        warnings=(Detail("llama.cpp computes; edgeinfer samples"),),
        template_options=options.template_options.over(model_file.template_options),
        sampling=model_file.sampling,
    )


def _opened(
    library: Any, model_file: ModelFile, context: int, threads: int | None, kv: LlamaCppCacheType
) -> Any:
    log = log_catcher()
    log.clear()
    try:
        return library.Llama(
            str(model_file.path),
            n_ctx=context,
            n_batch=BATCH,
            n_threads=threads,
            n_threads_batch=threads,
            type_k=kv.keys,
            type_v=kv.values,
            flash_attn=kv.needs_flash_attention,
            verbose=False,
        )
    except (ValueError, RuntimeError) as error:
        why = log.first_error or error
        raise UnsupportedModelError(f"{model_file.path.name}: llama.cpp can't load it ({why})") from error


def _trained_context(model_file: ModelFile) -> int:
    """The context length in the file; the default if edgeinfer can't read the file."""
    try:
        with GGUFFile.open(model_file.path) as file:
            architecture = file.metadata.get("general.architecture")
            named = file.metadata.get(f"{architecture}.context_length")
    except FormatError:  # only llama.cpp may be able to read the file; otherwise it reports the error
        return DEFAULT_CONTEXT
    return named if isinstance(named, int) and named > 0 else DEFAULT_CONTEXT
