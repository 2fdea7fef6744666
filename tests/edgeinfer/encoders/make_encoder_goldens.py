"""Write data/encoders.npz: llama.cpp's hidden states, vectors and scores on every random encoder. `python -m
tests.edgeinfer.encoders.make_encoder_goldens`.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer_quant_formats import GGUFFile
from tests.edgeinfer.make_logit_goldens import quantized
from tests.random_encoders import ENCODER_ZOO, TEXTS, RandomEncoder

GOLDENS = Path(__file__).parents[1] / "data" / "encoders.npz"
CONTEXT = 128
ROWS = (0, 7, 23, 24, 25, 30, 34, 51, 73)
"""Tokens of all texts whose hidden states are stored: first, middle and last ones of each text."""
NONE, POOLED = 0, -1
VARIANTS = ("plain", "quantized")
Rows = npt.NDArray[np.float32]


def encoder_of(name: str, variant: str, seed: int = 0) -> RandomEncoder:
    """A file of the zoo; in several formats if `variant` is "quantized"."""
    model: Any = replace(ENCODER_ZOO[name], seed=seed)
    encoder: Any = quantized(model) if variant == "quantized" else model
    assert isinstance(encoder, RandomEncoder)
    return encoder


def llama_cpp_rows(path: Path, pooling: int, texts: Sequence[Sequence[int]] = TEXTS) -> Rows:
    """Hidden states (tokens, hidden_size) of all texts; with the file's pooling (`POOLED`) vectors (texts,
    hidden_size) or scores (texts, classes).
    """
    import llama_cpp

    llama = llama_cpp.Llama(
        str(path),
        n_ctx=CONTEXT,
        n_batch=CONTEXT,
        n_ubatch=CONTEXT,
        embedding=True,
        pooling_type=pooling,
        verbose=False,
        n_threads=1,
        n_threads_batch=1,
    )
    batch, context = llama._batch, llama._ctx
    batch.reset()
    for index, ids in enumerate(texts):
        batch.add_sequence(ids, index, True)
    context.decode(batch)
    if pooling == NONE:
        count = sum(map(len, texts))
        values = llama_cpp.llama_get_embeddings(context.ctx)[: count * llama.n_embd()]
        result = np.array(values, np.float32).reshape(count, -1)
    else:
        size = classes(path) or llama.n_embd()
        found = [llama_cpp.llama_get_embeddings_seq(context.ctx, index)[:size] for index in range(len(texts))]
        result = np.array(found, np.float32)
    llama.close()
    return result


def classes(path: Path) -> int:
    """Outputs of the file's classifier; 0: it has none."""
    with GGUFFile.open(path) as file:
        info = file.tensors.get("cls.output.weight")
    return 0 if info is None else info.shape[0]


def has_pooling(model: RandomEncoder) -> bool:
    return bool(model.labels) or "pooling_type" in model.extra


def main() -> None:
    goldens: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in ENCODER_ZOO.items():
            for variant in VARIANTS:
                path = encoder_of(name, variant).write(Path(folder) / "model.gguf")
                if not model.dense:  # llama.cpp applies the dense layers to hidden states too.
                    goldens[f"{name} {variant}"] = llama_cpp_rows(path, NONE)[list(ROWS)]
                if has_pooling(model):
                    goldens[f"{name} {variant} pooled"] = llama_cpp_rows(path, POOLED)
    np.savez_compressed(GOLDENS, **goldens)
    print(f"{len(goldens)} arrays, {GOLDENS.stat().st_size} bytes")


if __name__ == "__main__":
    main()
