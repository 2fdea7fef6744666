"""The data for measuring quantizer errors; run it to measure llama.cpp's and store them.

python -m tests.quant_formats.quantizer_errors      (needs llama-cpp-python)
"""

import ctypes
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats import block_format, decode

GOLDENS = Path(__file__).parent / "goldens"
ERRORS_FILE = GOLDENS / "llama_cpp_errors.json"
SEARCHED_BY_IMPORTANCE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1")
GRID_FORMATS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M")
FORMATS = (*GRID_FORMATS, "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", *SEARCHED_BY_IMPORTANCE)
ARRAYS = ("gaussian", "heavy tails", "real weights")

Floats = NDArray[np.float32]


def weights_of(array: str) -> Floats:
    """Weights to quantize, (rows, 512); the real ones are from blk.3.attn_q of the built-in model."""
    random = np.random.default_rng(7)
    if array == "gaussian":
        return random.standard_normal((256, 512)).astype(np.float32)
    if array == "heavy tails":
        return (random.standard_t(5, (256, 512)) * 0.02).astype(np.float32)
    real: Floats = np.load(GOLDENS / "real_weights.npy").astype(np.float32)
    return real


def importance_of(columns: int) -> Floats:
    """A skewed importance, like that of activations."""
    return np.random.default_rng(3).gamma(0.5, size=columns).astype(np.float32)


def error(weights: Floats, raw: NDArray[np.uint8], name: str, importance: Floats | None = None) -> float:
    """Root mean square error of the blocks; with an importance, the squares are weighted by it."""
    squared_errors = (decode(raw, name).reshape(weights.shape).astype(np.float64) - weights) ** 2
    if importance is not None:
        squared_errors *= importance
    return float(np.sqrt(squared_errors.mean()))


def ggml_library() -> ctypes.CDLL:
    """The ggml library inside llama-cpp-python."""
    import llama_cpp

    return ctypes.CDLL(str(next((Path(llama_cpp.__file__).parent / "lib").glob("libggml-base.*"))))


def by_llama_cpp(weights: Floats, name: str, importance: Floats | None = None) -> NDArray[np.uint8]:
    """Quantize with `ggml_quantize_chunk` of the library inside llama-cpp-python.

    Without an importance, formats with a grid get one of ones: some end the process otherwise.
    """
    if importance is None and name in GRID_FORMATS:
        importance = np.ones(weights.shape[1], np.float32)
    quantize = ggml_library().ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    sizes = [ctypes.c_int64] * 3
    quantize.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *sizes, ctypes.c_void_p]
    kind = block_format(name)
    out = np.zeros(kind.nbytes(weights.shape), np.uint8)
    columns = None if importance is None else importance.ctypes.data
    quantize(kind.type_id, weights.ctypes.data, out.ctypes.data, 0, *weights.shape, columns)
    return out


def measure_llama_cpp() -> dict[str, dict[str, dict[str, float]]]:
    """llama.cpp's error for each array and format, plain and with an importance."""
    measurements: dict[str, dict[str, dict[str, float]]] = {}
    for array in ARRAYS:
        weights = weights_of(array)
        importance = importance_of(weights.shape[1])
        measurements[array] = {
            name: {
                "plain": error(weights, by_llama_cpp(weights, name), name),
                "importance": error(weights, by_llama_cpp(weights, name, importance), name, importance),
            }
            for name in FORMATS
        }
    return measurements


if __name__ == "__main__":
    ERRORS_FILE.write_text(json.dumps(measure_llama_cpp(), indent=1) + "\n", encoding="utf-8")
