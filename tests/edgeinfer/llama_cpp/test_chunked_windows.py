"""Llama 4 past its first chunk of 8192 positions: llama.cpp's windows and factors of queries."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.cpu.backend import CpuBackend, CpuOptions
from edgeinfer_kernels.cpu.compiler.features import choose
from edgeinfer_kernels.cpu.compiler.kernel_cache import load_kernels
from edgeinfer_kernels.cpu.compiler.kernel_units import kernel_units
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_quant_formats import GGUFFile
from tests.model_zoo import ZOO
from tests.random_models import VOCABULARY

CONTEXT, FIRST = 8256, 8180


@pytest.mark.slow
@pytest.mark.llama_cpp
def test_logits_around_the_end_of_a_chunk_equal_llama_cpp(tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    model = replace(ZOO["llama4"], context=16384, layers=4, heads=2, kv_heads=1, rope_tensors={})
    path = model.write(tmp_path / "model.gguf")
    ids = np.random.default_rng(1).integers(3, VOCABULARY, 8240).tolist()
    llama = llama_cpp.Llama(
        str(path), n_ctx=CONTEXT, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0
    )
    llama.eval(ids)
    theirs = np.array(llama.scores[FIRST : len(ids)], np.float32)
    llama.close()
    with GGUFFile.open(path) as file:
        config = read_config(file)
        spec, weights = config.specification(), read_weights(file, config)
        kernels = load_kernels(user_folder("cache"), choose(), kernel_units(weights))
        state = DecoderState.allocate(spec, CONTEXT, "f32")
        engine = NativeEngine(spec, CpuBackend(spec, weights, state, kernels, CpuOptions(64, 2)), CONTEXT, 64)
        ours = engine.append_all(ids)[FIRST:]
        engine.close()
    distances = np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
    assert distances.max() < 1e-4
