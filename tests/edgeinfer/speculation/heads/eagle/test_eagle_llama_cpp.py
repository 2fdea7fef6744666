"""EAGLE-3 heads against llama.cpp: the same fused states, and the same logits for the same pairs."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.model_config.layers.eagle_head import read_eagle_head
from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.reference import ReferenceBackend
from edgeinfer_quant_formats import GGUFFile
from tests.edgeinfer.speculation.heads.eagle.random_eagle import RandomEagle
from tests.random_models import RandomModel

pytestmark = pytest.mark.llama_cpp
TARGET = RandomModel("llama", layers=4)
COUNT = 20
Floats = npt.NDArray[np.float32]


class LlamaCpp:
    """A head with its own matrices. The function for its states is exported by its C++ name."""

    def __init__(self, path: Path) -> None:
        self.api: Any = pytest.importorskip("llama_cpp")
        library = ctypes.CDLL(str(next(Path(self.api.__file__).parent.glob("lib/libllama.so"))))
        hand_out = library["_Z26llama_set_embeddings_nextnP13llama_contextbb"]
        hand_out.argtypes = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool]
        self._states = library["_Z26llama_get_embeddings_nextnP13llama_context"]
        self._states.argtypes, self._states.restype = [ctypes.c_void_p], ctypes.POINTER(ctypes.c_float)
        params = self.api.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = self.api.llama_model_load_from_file(str(path).encode(), params)
        assert self._model
        self._vocabulary = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self._model))
        context = self.api.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = 128, 64, 64
        context.n_threads = context.n_threads_batch = 1
        context.type_k, context.type_v, context.flash_attn_type = 0, 0, 0
        self._context = self.api.llama_init_from_model(self._model, context)
        hand_out(self._context, True, True)

    def _run(self, call: Any, ids: list[int] | None, rows: Floats) -> None:
        batch = self.api.llama_batch_init(64, 0 if ids else rows.shape[1], 1)
        if ids:
            batch.embd = rows.ctypes.data_as(type(batch.embd))
        else:
            ctypes.memmove(batch.embd, rows.ctypes.data, rows.nbytes)
        batch.n_tokens = len(rows)
        for index in range(len(rows)):
            if ids:
                batch.token[index] = ids[index]
            batch.pos[index] = index
            batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, 0, 1
        assert call(self._context, batch) == 0
        if ids:
            batch.embd = type(batch.embd)()  # the array isn't the library's
        self.api.llama_batch_free(batch)

    def fused(self, features: Floats, width: int) -> Floats:
        """The states of the head's encoder."""
        self._run(self.api.llama_encode, None, features)
        return np.ctypeslib.as_array(self._states(self._context), (len(features), width)).copy()

    def logits(self, ids: list[int], fused: Floats) -> Floats:
        self._run(self.api.llama_decode, ids, fused)
        return np.ctypeslib.as_array(
            self.api.llama_get_logits(self._context), (len(ids), self._vocabulary)
        ).copy()

    def close(self) -> None:
        self.api.llama_free(self._context)
        self.api.llama_model_free(self._model)


@pytest.mark.parametrize("norms", [False, True])
def test_a_head_has_the_states_and_the_logits_of_llama_cpp(tmp_path: Path, norms: bool) -> None:
    target = GGUFFile.open(TARGET.write(tmp_path / "target.gguf"))
    config = read_config(target)
    made = RandomEagle(own_table=True, norm_before_fc=norms, norm_before_residual=norms)
    path = made.write(tmp_path / "head.gguf")
    head = read_eagle_head(GGUFFile.open(path), config, read_weights(target, config))
    random = np.random.default_rng(5)
    ids = random.integers(3, config.vocabulary_size, COUNT).tolist()
    features = random.standard_normal((COUNT, 3 * config.width)).astype(np.float32)
    peer = LlamaCpp(path)
    fused = peer.fused(features, made.width)
    expected = peer.logits(ids, fused)
    peer.close()
    backend = ReferenceBackend(
        head.spec, head.weights, DecoderState.allocate(head.spec, 64, "f32"), np.float64
    )
    backend.set_hidden(features, 0)
    x = backend.embed(ids)
    backend.forward(x, 0)
    np.testing.assert_allclose(backend.logits(x), expected[:, made.ids()], atol=2e-4)
