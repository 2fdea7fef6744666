"""Importance matrices: equal to sums over recorded inputs and to llama.cpp's, resumed after an interrupt."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.calibration.checkpoint import Checkpoint
from edgeinfer.calibration.importance import measure_importance
from edgeinfer.calibration.reference_model import reference_model
from edgeinfer.errors import SettingError
from edgeinfer.llama_cpp.library import llama_cpp_library, log_catcher
from edgeinfer_kernels.decoder_state import DecoderState, Routing
from edgeinfer_kernels.reference.backend import ReferenceBackend
from edgeinfer_kernels.reference.step import normalize
from edgeinfer_quant_formats import GGUFFile
from edgeinfer_quant_formats.quantizer.importance_file import read_importance
from tests.edgeinfer.conftest import ZooFile

TEXT = "the heron ate in the rain on a stone " * 40
Floats = npt.NDArray[np.float64]


def test_the_file_has_the_squared_inputs_of_each_matrix(zoo_file: ZooFile, tmp_path: Path) -> None:
    """Of the first layer: its queries read the normed embeddings."""
    out = tmp_path / "imatrix.gguf"
    count = measure_importance(zoo_file("llama"), TEXT, out, tokens=512, dataset="herons")
    with GGUFFile.open(out) as made, GGUFFile.open(zoo_file("llama")) as file:
        assert made.metadata["general.type"] == "imatrix"
        assert made.metadata["imatrix.datasets"] == ["herons"]
        assert made.metadata["imatrix.chunk_size"] == 256
        assert len(made.tensors) == 2 * count == 2 * 7 * 3
        model = reference_model(file)
        windows = model.windows(TEXT, 512)
        assert made.metadata["imatrix.chunk_count"] == len(windows) == 2
        x = np.concatenate([model.weights.token_embd.decoded_rows(np.asarray(ids)) for ids in windows])
        weights = model.weights.layers[0].blocks[0]
        inputs = normalize(x.astype(np.float64), model.spec.layers[0].blocks[0].norm, weights.norm)
        for name in ("attn_q", "attn_k", "attn_v"):
            sums = made.decode(f"blk.0.{name}.weight.in_sum2")
            np.testing.assert_allclose(sums, (inputs**2).sum(axis=0)[None], rtol=1e-4)
            assert made.decode(f"blk.0.{name}.weight.counts").tolist() == [[512]]


def test_experts_count_the_tokens_that_were_routed_to_them(zoo_file: ZooFile, tmp_path: Path) -> None:
    path, out = zoo_file("qwen3moe"), tmp_path / "imatrix.gguf"
    measure_importance(path, TEXT, out, tokens=256)
    with GGUFFile.open(path) as file, GGUFFile.open(out) as made:
        model = reference_model(file)
        (ids,) = model.windows(TEXT, 256)
        routing = Routing.allocate(model.spec, len(ids))
        state = DecoderState.allocate(model.spec, len(ids), "f32")
        backend = ReferenceBackend(model.spec, model.weights, state, routing=routing)
        backend.forward(backend.embed(ids), 0)
        experts = file.tensors["blk.1.ffn_up_exps.weight"].shape[0]
        counts = made.decode("blk.1.ffn_down_exps.weight.counts")[:, 0]
        assert counts.tolist() == np.bincount(routing.ids[1].reshape(-1), minlength=experts).tolist()
        assert made.tensors["blk.1.ffn_up_exps.weight.in_sum2"].shape == (experts, 64)
    assert read_importance(out).tensors["blk.1.ffn_up_exps.weight"].shape == (experts * 64,)


def test_an_interrupted_run_resumes_with_the_same_result(zoo_file: ZooFile, tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole.gguf", tmp_path / "resumed.gguf"
    measure_importance(zoo_file("llama"), TEXT, whole, tokens=768)
    seen: list[int] = []

    def interrupt(_: str, done: int, total: int) -> None:
        seen.append(done)
        if done == 2 and len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_importance(zoo_file("llama"), TEXT, resumed, tokens=768, report=interrupt)
    assert not resumed.exists()
    measure_importance(zoo_file("llama"), TEXT, resumed, tokens=768, report=interrupt)
    assert seen == [1, 2, 3]
    assert resumed.read_bytes() == whole.read_bytes()
    assert not resumed.with_name("resumed.gguf.partial").exists()


def test_a_checkpoint_of_other_settings_is_emptied_and_a_strange_folder_refused(tmp_path: Path) -> None:
    target = tmp_path / "run" / "here"
    first = Checkpoint(target, "one")
    first.store("a", {"x": np.ones(2)})
    again = Checkpoint(target, "one").load("a")
    assert again is not None
    assert again["x"].tolist() == [1, 1]
    assert Checkpoint(target, "two").load("a") is None
    (tmp_path / "other").mkdir()
    with pytest.raises(SettingError, match=r"holds no run.txt, wanted the intermediate results"):
        Checkpoint(tmp_path / "other", "one")


def test_a_short_text_and_an_encoder_are_refused_in_one_line(zoo_file: ZooFile, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="tokens, wanted at least 256"):
        measure_importance(zoo_file("llama"), "the heron", tmp_path / "out.gguf")
    with pytest.raises(SettingError, match="wanted the path of a file to write"):
        measure_importance(zoo_file("llama"), TEXT, tmp_path)


class GgmlTensor(ctypes.Structure):
    """The beginning of `struct ggml_tensor`."""

    _fields_ = (
        ("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4), ("op", ctypes.c_int), ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32), ("src", ctypes.c_void_p * 10), ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t), ("data", ctypes.c_void_p), ("name", ctypes.c_char * 64),
    )  # fmt: skip


class LlamaCppSums:
    """Sums the squared inputs of llama.cpp's matrices, by tensor name."""

    def __init__(self) -> None:
        self.sums: dict[str, Floats] = {}

    def seen(self, address: int, ask: bool, _: Any) -> bool:
        tensor = GgmlTensor.from_address(address)
        if not tensor.src[0] or not tensor.src[1]:
            return not ask
        weights, inputs = (GgmlTensor.from_address(tensor.src[index]) for index in (0, 1))
        name = weights.name.decode()
        is_matrix = name.startswith("blk.") and name.endswith(".weight") and weights.ne[1] > 1
        if ask or not is_matrix or inputs.type:
            return is_matrix or not ask
        count = inputs.ne[0] * inputs.ne[1]
        rows = np.ctypeslib.as_array((ctypes.c_float * count).from_address(inputs.data))
        squares = (rows.reshape(-1, inputs.ne[0]).astype(np.float64) ** 2).sum(axis=0)
        self.sums[name] = self.sums.get(name, np.zeros(len(squares))) + squares
        return True


def decode_in_llama_cpp(path: Path, windows: list[tuple[int, ...]], seen: Callable[..., bool]) -> None:
    """Process each window in llama.cpp with an eval callback."""
    llama_cpp = llama_cpp_library("the test")
    log_catcher().clear()
    llama_cpp.llama_backend_init()
    options = llama_cpp.llama_model_default_params()
    options.n_gpu_layers = 0
    options.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = 512
    settings.n_threads = settings.n_threads_batch = 1
    callback = llama_cpp.ggml_backend_sched_eval_callback(seen)
    settings.cb_eval = callback
    context = llama_cpp.llama_init_from_model(model, settings)
    for window in windows:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        ids = (ctypes.c_int32 * len(window))(*window)
        batch, outputs = llama_cpp.llama_batch_get_one(ids, len(window)), (ctypes.c_int8 * len(window))()
        outputs[:] = [1] * len(window)
        batch.logits = outputs
        assert llama_cpp.llama_decode(context, batch) == 0
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)


@pytest.mark.llama_cpp
def test_the_sums_are_those_of_llama_cpp(zoo_file: ZooFile, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    path, out, theirs = zoo_file("llama"), tmp_path / "imatrix.gguf", LlamaCppSums()
    measure_importance(path, TEXT, out, tokens=512)
    with GGUFFile.open(path) as file:
        windows = reference_model(file).windows(TEXT, 512)
    decode_in_llama_cpp(path, windows, theirs.seen)
    with GGUFFile.open(out) as made:
        ours = {name.removesuffix(".in_sum2") for name in made.tensors if name.endswith(".in_sum2")}
        assert ours == set(theirs.sums)
        for name, sums in theirs.sums.items():
            found = made.decode(f"{name}.in_sum2")[0]
            assert np.linalg.norm(found - sums) < 5e-3 * np.linalg.norm(sums), name
