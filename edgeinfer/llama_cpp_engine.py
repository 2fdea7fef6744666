"""The way out for models that edgeinfer doesn't run: the same protocol over llama-cpp-python."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.catalogue import ModelFile
from edgeinfer.chat_format import ChatFormat
from edgeinfer.errors import UnsupportedModelError
from edgeinfer.language_model import Progress
from edgeinfer.llama_cpp_library import llama_cpp_library
from edgeinfer.model import Model
from edgeinfer.tokenizer.stream_decoder import StreamDecoder

BATCH = 256
DEFAULT_CONTEXT = 4096


class LlamaCppTokenizer:
    """llama.cpp's own tokenizer, whatever its kind."""

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
        found = int(question(self._vocabulary))
        return found if found >= 0 else None

    def encode(self, text: str, *, bos: bool = False, special: bool = False) -> list[int]:
        """Ids of a text, as `Tokenizer.encode`."""
        return list(self._llama.tokenize(text.encode(), add_bos=bos, special=special))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for."""
        return self._piece(token_id, special=True)

    def _piece(self, token_id: int, special: bool) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = self._library.llama_token_to_piece(self._vocabulary, token_id, buffer, size, 0, special)
            if count >= 0:
                return bytes(buffer.raw[:count])
            size = -count

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ids, as `Tokenizer.decode`."""
        return bytes(self._llama.detokenize(list(ids), special=special)).decode("utf-8", "replace")

    def stream_decoder(self) -> StreamDecoder:
        """Ids to text as they come."""
        return StreamDecoder(lambda token_id: self._piece(token_id, special=False))


class LlamaCppEngine:
    """llama.cpp behind the engine protocol: it computes, edgeinfer samples."""

    def __init__(self, llama: Any, bytes_per_token: int) -> None:
        self._llama = llama
        self.bytes_per_token = bytes_per_token
        self.ids: list[int] = []
        self.context: int = llama.n_ctx()
        self.largest_context: int = max(self.context, llama._model.n_ctx_train())
        self.vocabulary_size: int = llama.n_vocab()

    def append(self, ids: Sequence[int], progress: Progress | None = None) -> npt.NDArray[np.float32]:
        """As the protocol says."""
        for first in range(0, len(ids), BATCH):
            self._read(ids[first : first + BATCH])
            if progress:
                progress(min(first + BATCH, len(ids)), len(ids))
        return self._logits()

    def append_all(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """As the protocol says; one token at a time."""
        rows = []
        for token_id in ids:
            self._read([token_id])
            rows.append(self._logits())
        return np.stack(rows)

    def _read(self, ids: Sequence[int]) -> None:
        self._llama.n_tokens = len(self.ids)
        self._llama.eval(list(ids))
        self.ids.extend(ids)

    def _logits(self) -> npt.NDArray[np.float32]:
        pointer = self._llama._ctx.get_logits_ith(-1)
        return np.ctypeslib.as_array(pointer, shape=(self.vocabulary_size,)).astype(np.float32)

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        del self.ids[length:]

    def close(self) -> None:
        """Free llama.cpp's model."""
        self._llama.close()


def load_llama_cpp(
    found: ModelFile, context: int | None, threads: int | None, chat_template: str | None
) -> Model:
    """Load a file with llama.cpp. Raises `EdgeInferError` if it isn't installed or refuses the file."""
    llama_cpp = llama_cpp_library("--engine llama.cpp")
    try:
        llama = llama_cpp.Llama(
            str(found.path),
            n_ctx=context or DEFAULT_CONTEXT,
            n_batch=BATCH,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )
    except (ValueError, RuntimeError) as error:
        raise UnsupportedModelError(f"{found.path.name}: llama.cpp can't load it ({error})") from error
    tokenizer = LlamaCppTokenizer(llama, llama_cpp)
    template = chat_template or llama.metadata.get("tokenizer.chat_template")
    texts = {
        name: None if token is None else tokenizer.token_bytes(token).decode("utf-8", "replace")
        for name, token in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id))
    }
    return Model(
        name=found.name,
        engine=LlamaCppEngine(llama, found.size_bytes),
        tokenizer=tokenizer,
        chat_format=ChatFormat(template, texts["bos"], texts["eos"]) if template else None,
        prompt_style=found.prompt_style,
        notes=("llama.cpp computes; edgeinfer samples",),
    )
