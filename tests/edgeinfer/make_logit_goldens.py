"""Write data/logits.npz: llama.cpp's logits on every file of the zoo without goldens. `python -m
tests.edgeinfer.make_logit_goldens`; `--all` computes all of them again.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.model_zoo import ZOO
from tests.random_models import VOCABULARY, RandomModel

GOLDENS = Path(__file__).parent / "data" / "logits.npz"
IDS = np.random.default_rng(7).integers(3, VOCABULARY, 24).tolist()
STORED_POSITIONS = [0, 1, 5, 6, 7, 12, 22, 23]
"""Positions whose logits are stored: the first, around a window of six, the last."""
QUANTIZED = ("Q4_K", "Q6_K", "Q8_0")
CONTEXT = 128


def quantized(model: RandomModel) -> RandomModel:
    """The same architecture, wide enough for blocks of 256, in a mix of formats."""
    factors = {
        name: np.linspace(1.0, float(values[-1]), 16, dtype=np.float32)
        for name, values in model.rope_tensors.items()
    }
    has_length = "expert_feed_forward_length" in model.extra
    return replace(
        model,
        width=256,
        feed_forward=512,
        extra={**model.extra, **({"expert_feed_forward_length": 512} if has_length else {})},
        expert_length=256 if model.expert_length else 0,
        shared_length=256 if model.shared_length else 0,
        latent_size=256 if model.latent_size else 0,
        heads=8,
        kv_heads=8 if model.kv_heads == model.heads else 4,
        head_dim=32,
        formats=QUANTIZED,
        rope_tensors=factors,
    )


def llama_cpp_logits(
    path: Path, ids: list[int], context: int = CONTEXT, **options: Any
) -> npt.NDArray[np.float32]:
    """(len(ids), vocabulary) from llama.cpp with a float32 cache; `options` of its `Llama`."""
    import llama_cpp

    llama = llama_cpp.Llama(
        str(path),
        n_ctx=context,
        logits_all=True,
        verbose=False,
        n_threads=1,
        n_threads_batch=1,
        type_k=0,
        type_v=0,
        **options,
    )
    llama.eval(ids)
    logits = np.array(llama.scores[: len(ids)], np.float32)
    llama.close()
    return logits


def main() -> None:
    goldens: dict[str, Any] = {} if "--all" in sys.argv else dict(np.load(GOLDENS))
    with tempfile.TemporaryDirectory() as folder:
        for name, model in ZOO.items():
            for suffix, variant in (("", model), (" quantized", quantized(model))):
                if name + suffix in goldens:
                    continue
                path = variant.write(Path(folder) / "model.gguf")
                goldens[name + suffix] = llama_cpp_logits(path, IDS)[STORED_POSITIONS]
    np.savez_compressed(GOLDENS, **goldens)
    print(f"{len(goldens)} files, {GOLDENS.stat().st_size} bytes")


if __name__ == "__main__":
    main()
