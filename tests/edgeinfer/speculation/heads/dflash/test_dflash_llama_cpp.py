"""Block drafters against llama.cpp: the same logits of a block after the same hidden states."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.model_config.layers.block_drafts import BlockDraftModel, read_block_drafts
from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer.speculation.heads.candidate_selector import CandidateSelector
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.reference import ReferenceBackend
from edgeinfer_quant_formats import GGUFFile
from tests.edgeinfer.speculation.heads.dflash.random_dflash import VARIANTS
from tests.random_models import RandomModel

pytestmark = pytest.mark.llama_cpp
TARGET = RandomModel("llama", layers=4)
COUNT = 20
Floats = npt.NDArray[np.float32]


class LlamaCpp:
    """A drafter with its own matrices. The functions for its lattice are exported by their C++ names."""

    def __init__(self, path: Path, *, causal: bool) -> None:
        self.api: Any = pytest.importorskip("llama_cpp")
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
        self.api.llama_set_causal_attn(self._context, causal)
        library = ctypes.CDLL(str(next(Path(self.api.__file__).parent.glob("lib/libllama.so"))))
        hand_out = library["_Z26llama_set_embeddings_nextnP13llama_contextbb"]
        hand_out.argtypes = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool]
        hand_out(self._context, True, False)
        self._lattice = library["_Z26llama_get_embeddings_nextnP13llama_context"]
        self._lattice.argtypes, self._lattice.restype = [ctypes.c_void_p], ctypes.POINTER(ctypes.c_float)

    def process(self, states: Floats) -> None:
        """Write the keys and values of hidden states to the cache."""
        batch = self.api.llama_batch_init(64, states.shape[1], 1)
        ctypes.memmove(batch.embd, states.ctypes.data, states.nbytes)
        self._decode(batch, len(states), 0, outputs=False)

    def logits(self, ids: list[int], start: int) -> Floats:
        """Those of a block."""
        batch = self.api.llama_batch_init(64, 0, 1)
        for index, token in enumerate(ids):
            batch.token[index] = token
        self._decode(batch, len(ids), start, outputs=True)
        rows = np.ctypeslib.as_array(self.api.llama_get_logits(self._context), (len(ids), self._vocabulary))
        return np.asarray(rows).copy()

    def lattice(self, rows: int, width: int) -> Floats:
        """Of a selector, for each row of the last block: the candidates, and their scores after each of those
        of the row before.
        """
        return np.asarray(np.ctypeslib.as_array(self._lattice(self._context), (rows, width))).copy()

    def _decode(self, batch: Any, count: int, start: int, *, outputs: bool) -> None:
        batch.n_tokens = count
        for index in range(count):
            batch.pos[index], batch.n_seq_id[index] = start + index, 1
            batch.seq_id[index][0], batch.logits[index] = 0, outputs
        assert self.api.llama_decode(self._context, batch) == 0
        self.api.llama_batch_free(batch)

    def close(self) -> None:
        self.api.llama_free(self._context)
        self.api.llama_model_free(self._model)


def logits_of(model: BlockDraftModel, states: Floats, ids: list[int]) -> Floats:
    """The logits of the formula, those of the Markov head with the most probable token before each."""
    state = model.allocate_state(64, "f32")
    backend = ReferenceBackend(model.spec, model.weights, state, np.float64)
    backend.set_hidden(states, 0)
    backend.forward_layers(backend.embed([0] * len(states)), 0, [0])
    x = backend.embed(ids)
    backend.forward_layers(x, len(states), range(1, len(model.spec.layers)))
    logits = backend.logits(x)
    if model.markov is None:
        return logits
    head = ReferenceBackend(model.markov.spec, model.markov.weights, DecoderState(), np.float64)
    rows = model.weights.output_ids
    token = ids[0]
    for row in logits[0 if model.from_first else 1 :]:
        row += head.logits(head.embed([token]))[0]
        token = int(row.argmax()) if rows is None else int(rows[row.argmax()])
    return logits


@pytest.mark.parametrize("name", VARIANTS)
def test_a_block_has_the_logits_of_llama_cpp(tmp_path: Path, name: str) -> None:
    made = VARIANTS[name]
    with (
        GGUFFile.open(TARGET.write(tmp_path / "target.gguf")) as target,
        GGUFFile.open(made.write(tmp_path / "draft.gguf")) as file,
    ):
        config = read_config(target)
        model = read_block_drafts(file, config, read_weights(target, config))
        random = np.random.default_rng(5)
        states = random.standard_normal((COUNT, len(made.target_layers) * config.width)).astype(np.float32)
        ids = [int(random.integers(5, config.vocabulary_size)), *[model.mask_token] * (made.block_size - 1)]
        causal = bool(made.extra.get("attention.causal", False))
        peer = LlamaCpp(file.path, causal=causal)
        peer.process(states)
        expected = peer.logits(ids, COUNT)[:, made.ids()]
        peer.close()
        # llama.cpp reads GELU from a table in f16.
        atol = 3e-4 * np.abs(expected).max() if name == "gemma" else 2e-4
        np.testing.assert_allclose(logits_of(model, states, ids), expected, atol=atol)


@pytest.mark.parametrize("name", ["selector", "selector-ids"])
def test_a_selector_has_the_scores_of_llama_cpp(tmp_path: Path, name: str) -> None:
    made = VARIANTS[name]
    with (
        GGUFFile.open(TARGET.write(tmp_path / "target.gguf")) as target,
        GGUFFile.open(made.write(tmp_path / "draft.gguf")) as file,
    ):
        config = read_config(target)
        model = read_block_drafts(file, config, read_weights(target, config))
        random = np.random.default_rng(5)
        states = random.standard_normal((COUNT, len(made.target_layers) * config.width)).astype(np.float32)
        ids = [int(random.integers(5, config.vocabulary_size)), *[model.mask_token] * (made.block_size - 1)]
        peer = LlamaCpp(file.path, causal=False)
        peer.process(states)
        peer.logits(ids, COUNT)
        lattice = peer.lattice(made.block_size, config.width)
        peer.close()
        backend = ReferenceBackend(model.spec, model.weights, model.allocate_state(64, "f32"), np.float64)
        backend.set_hidden(states, 0)
        backend.forward_layers(backend.embed([0] * COUNT), 0, [0])
        x = backend.embed(ids)
        backend.forward_layers(x, COUNT, range(1, len(model.spec.layers)))
        assert model.selector is not None
        selector, count = CandidateSelector(model.selector, model.weights.output_ids), model.selector.count
        selector.begin(backend.final_norm(x))
        before, rows = [ids[0]] * count, made.ids().tolist()
        for row in range(1, made.block_size):
            found = lattice[row, :count].astype(int).tolist()
            scores = lattice[row, count : count + count * count].reshape(count, count)
            for token, expected in zip(before, scores, strict=True):
                actual = selector.selected(row, backend.logits(x)[row], token)
                at = [rows.index(candidate) for candidate in found]
                np.testing.assert_allclose(actual[at], expected, atol=1e-3)
                assert np.isfinite(actual).sum() == count
            before = found
