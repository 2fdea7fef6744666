"""Draft heads against llama.cpp's MTP context: the same logits for the same pairs."""

import ctypes
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.model_config.layers.draft_head import read_draft_head
from edgeinfer.model_config.weights import read_config, read_weights, rope_factors
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.reference import ReferenceBackend
from edgeinfer_quant_formats import GGUFFile
from tests.edgeinfer.speculation.heads.random_assistant import assistant_logits, random_assistant
from tests.edgeinfer.speculation.heads.random_heads import HEADS, HEADS_OF, nemotron_head
from tests.model_zoo import ZOO
from tests.random_models import VOCABULARY, RandomModel

pytestmark = pytest.mark.llama_cpp
COUNT = 20
Floats = npt.NDArray[np.float32]


class LlamaCpp:
    """A model with its MTP context. The functions for hidden states are exported by their C++ names."""

    def __init__(self, path: Path) -> None:
        self.api = pytest.importorskip("llama_cpp")
        library = ctypes.CDLL(str(next(Path(self.api.__file__).parent.glob("lib/libllama.so"))))
        self._hand_out = library["_Z26llama_set_embeddings_nextnP13llama_contextbb"]
        self._hand_out.argtypes = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool]
        self.hidden = library["_Z26llama_get_embeddings_nextnP13llama_context"]
        self.hidden.argtypes, self.hidden.restype = [ctypes.c_void_p], ctypes.POINTER(ctypes.c_float)
        self._select = library["_Z28llama_set_nextn_layer_offsetP13llama_contexti"]
        self._select.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        params = self.api.llama_model_default_params()
        params.n_gpu_layers, params.load_mtp = 0, True
        self.model = self.api.llama_model_load_from_file(str(path).encode(), params)
        self.width = self.api.llama_model_n_embd(self.model)
        self.vocabulary = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model))

    def context(self, kind: int, other: ctypes.c_void_p | None = None) -> ctypes.c_void_p:
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 128, 64, 64
        params.n_threads = params.n_threads_batch = 1
        params.ctx_type, params.type_k, params.type_v, params.flash_attn_type = kind, 0, 0, 0
        params.ctx_other = other
        context: ctypes.c_void_p = self.api.llama_init_from_model(self.model, params)
        self._hand_out(context, True, kind == 1)
        return context

    def decode(
        self, context: ctypes.c_void_p, ids: list[int], hidden: Floats | None, start: int = 0
    ) -> Floats:
        batch = self.api.llama_batch_init(64, 0, 1)
        if hidden is not None:
            batch.embd = hidden.ctypes.data_as(type(batch.embd))
        batch.n_tokens = len(ids)
        for index, token in enumerate(ids):
            batch.token[index], batch.pos[index] = token, start + index
            batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, 0, 1
        assert self.api.llama_decode(context, batch) == 0
        batch.embd = type(batch.embd)()  # the array isn't the library's
        self.api.llama_batch_free(batch)
        return np.ctypeslib.as_array(self.api.llama_get_logits(context), (len(ids), self.vocabulary)).copy()

    def drafted(self, ids: list[int], heads: int = 1) -> tuple[Floats, list[Floats]]:
        """The target's hidden states of some tokens, and the logits of each head for each token and the state
        before it, which is 0 for the first.
        """
        target = self.context(0)
        self.decode(target, ids, None)
        hidden = np.ctypeslib.as_array(self.hidden(target), (len(ids), self.width)).copy()
        shifted = np.concatenate([np.zeros((1, self.width), np.float32), hidden[:-1]])
        contexts, logits = [target], list[Floats]()
        for head in range(heads):
            contexts.append(self.context(1))
            self._select(contexts[-1], head)
            logits.append(self.decode(contexts[-1], ids, np.ascontiguousarray(shifted)))
        for context in contexts:
            self.api.llama_free(context)
        self.api.llama_model_free(self.model)
        return hidden, logits

    def with_assistant(self, path: Path, ids: list[int], drafted: list[int]) -> list[Floats]:
        """The logits of an assistant after a text, whose last token the target hasn't processed, and after
        each of some drafted tokens.
        """
        target, assistant = self.context(0), LlamaCpp(path)
        context = assistant.context(1, target)  # it empties the cells that both share
        self.decode(target, ids[:-1], None)
        states = np.ctypeslib.as_array(self.hidden(target), (len(ids) - 1, self.width))[-1:].copy()
        logits = list[Floats]()
        for token in (ids[-1], *drafted):
            logits.append(assistant.decode(context, [token], states, len(ids) - 1)[0])
            states = np.ctypeslib.as_array(self.hidden(context), (1, self.width)).copy()
        self.api.llama_free(context)
        self.api.llama_free(target)
        self.api.llama_model_free(assistant.model)
        self.api.llama_model_free(self.model)
        return logits


MODELS: dict[str, RandomModel] = {
    **{
        name: replace(ZOO[name], layers=4, draft_head=True)
        for name in ("qwen35", "qwen35moe", "qwen3next", "glm4moe", "deepseek2")
    },
    "nemotron_h_moe": nemotron_head(),
    "nemotron_h_moe-latent": nemotron_head(latent=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_head_has_the_logits_of_llama_cpp(tmp_path: Path, name: str) -> None:
    path = MODELS[name].write(tmp_path / "model.gguf")
    file = GGUFFile.open(path)
    config = read_config(file)
    weights = read_weights(file, config)
    head = read_draft_head(file, config, weights)
    ids = np.random.default_rng(5).integers(3, config.vocabulary_size, COUNT).tolist()
    hidden, (expected,) = LlamaCpp(path).drafted(ids)
    target, draft = (
        ReferenceBackend(spec, each, DecoderState.allocate(spec, 64, "f32"), np.float64)
        for spec, each in ((config.specification(), weights), (head.spec, head.weights))
    )
    x = target.embed(ids)
    target.forward(x, 0)
    states = target.final_norm(x)
    np.testing.assert_allclose(states, hidden, atol=1e-4)
    draft.set_hidden(np.concatenate([np.zeros((1, config.width), np.float32), states[:-1]]), 0)
    x = draft.embed(ids)
    draft.forward(x, 0)
    np.testing.assert_allclose(draft.logits(x), expected, atol=2e-4)


@pytest.mark.parametrize("own_outputs", [False, True])
@pytest.mark.parametrize("name", HEADS_OF)
def test_several_heads_have_the_logits_of_llama_cpp(tmp_path: Path, name: str, own_outputs: bool) -> None:
    path = HEADS_OF[name](own_outputs).write(tmp_path / "model.gguf")
    file = GGUFFile.open(path)
    config = read_config(file)
    weights, factors = read_weights(file, config), rope_factors(file, config, 64)
    ids = np.random.default_rng(5).integers(3, config.vocabulary_size, COUNT).tolist()
    hidden, logits = LlamaCpp(path).drafted(ids, HEADS)
    spec = config.specification(factors)
    target = ReferenceBackend(spec, weights, DecoderState.allocate(spec, 64, "f32"), np.float64)
    x = target.embed(ids)
    target.forward(x, 0)
    np.testing.assert_allclose(x, hidden, atol=1e-4 * np.abs(hidden).max())
    states = np.concatenate([np.zeros((1, config.width)), x[:-1]]).astype(np.float32)
    for index, expected in enumerate(logits):
        head = read_draft_head(file, config, weights, factors, head=index)
        state = DecoderState.allocate(head.spec, 64, "f32")
        draft = ReferenceBackend(head.spec, head.weights, state, np.float64)
        draft.set_hidden(states, 0)
        x = draft.embed(ids)
        draft.forward(x, 0)
        np.testing.assert_allclose(draft.logits(x), expected, atol=2e-4)


@pytest.mark.parametrize(("target", "pattern"), [("gemma4", "wwg"), ("gemma4-per-layer", "gw")])
@pytest.mark.parametrize("count", [3, COUNT])
def test_an_assistant_has_the_logits_of_llama_cpp(
    tmp_path: Path, target: str, pattern: str, count: int
) -> None:
    paths = ZOO[target].write(tmp_path / "model.gguf"), tmp_path / "assistant.gguf"
    random_assistant(pattern).write(paths[1])
    ids, drafted = np.split(np.random.default_rng(5).integers(3, VOCABULARY, count + 4), [count])
    expected = LlamaCpp(paths[0]).with_assistant(paths[1], ids.tolist(), drafted.tolist())
    actual = assistant_logits(*paths, ids.tolist(), drafted.tolist())
    # llama.cpp reads GELU from a table in f16.
    np.testing.assert_allclose(actual, expected, atol=3e-4 * np.abs(expected).max())
