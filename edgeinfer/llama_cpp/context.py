"""A model in llama.cpp through its C API, used as in llama-bench."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import EdgeInferError, UnsupportedModelError
from edgeinfer.llama_cpp.library import llama_cpp_cache_type, llama_cpp_library, log_catcher

BATCH = 512


class LlamaCppContext:
    """Processes ids on the CPU; all other options have llama.cpp's defaults.

    Raises `EdgeInferError` if llama-cpp-python isn't installed, `UnsupportedModelError` if llama.cpp refuses
    the file.
    """

    def __init__(self, path: Path, context: int, threads: int, requested_by: str, kv: str = "f16") -> None:
        self._library = library = llama_cpp_library(requested_by)
        library.llama_backend_init()
        log = log_catcher()
        log.clear()
        options = library.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = library.llama_model_load_from_file(str(path).encode(), options)
        if not self._model:
            raise UnsupportedModelError(f"{path.name}: llama.cpp can't load it ({log.first_error})")
        self._context = library.llama_init_from_model(
            self._model, self._context_options(context, threads, kv)
        )
        if not self._context:
            library.llama_model_free(self._model)
            raise UnsupportedModelError(f"{path.name}: llama.cpp has no context for it ({log.first_error})")
        self._memory = library.llama_get_memory(self._context)
        self.vocabulary_size = int(library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model)))
        self._tokens = (ctypes.c_int32 * BATCH)()
        self._outputs = (ctypes.c_int8 * BATCH)(*[1] * BATCH)

    def _context_options(self, context: int, threads: int, kv: str) -> object:
        options = self._library.llama_context_default_params()
        options.n_ctx = context
        options.n_batch = options.n_ubatch = BATCH
        options.n_threads = options.n_threads_batch = threads
        options.type_k, options.type_v, _ = llama_cpp_cache_type(kv)
        options.offload_kqv = options.op_offload = False
        return options

    def read(self, ids: Sequence[int]) -> None:
        """Append `ids`; logits are computed after the last of each batch only."""
        self._decode(ids, every_output=False)

    def read_all(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Append at most 512 `ids`; return the logits (len(ids), vocabulary) after each, valid until the next
        call.
        """
        if len(ids) > BATCH:
            raise ValueError(f"{len(ids)} tokens, wanted at most {BATCH}")
        self._decode(ids, every_output=True)
        logits = self._library.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (len(ids), self.vocabulary_size))

    def _decode(self, ids: Sequence[int], every_output: bool) -> None:
        library = self._library
        for first in range(0, len(ids), BATCH):
            part = ids[first : first + BATCH]
            self._tokens[: len(part)] = list(part)
            batch = library.llama_batch_get_one(self._tokens, len(part))
            if every_output:
                batch.logits = self._outputs
            code = library.llama_decode(self._context, batch)
            if code:
                raise EdgeInferError(f"llama.cpp failed to read {len(part)} tokens (code {code})")
        library.llama_synchronize(self._context)

    def rewind(self, length: int) -> None:
        """Truncate the KV cache to the first `length` tokens."""
        self._library.llama_memory_seq_rm(self._memory, 0, length, -1)

    def describe(self) -> str:
        """The processor features that this build of llama.cpp uses."""
        return " ".join(self._library.llama_print_system_info().decode().split())

    def close(self) -> None:
        """Free the model. May be called twice."""
        if self._context:
            self._library.llama_free(self._context)
            self._library.llama_model_free(self._model)
            self._context = self._model = None
