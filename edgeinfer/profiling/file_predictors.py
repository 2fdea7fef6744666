"""Predictors of active neurons that a model's file has, as PowerInfer's files do."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.hugging_face.powerinfer_file import PowerInferFile
from edgeinfer.profiling.predictor_training import stored_predictor
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.cpu.sparse import sparse_index
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_kernels.neuron_predictor import NeuronPredictor
from edgeinfer_quant_formats import GGUFFile

RANKS = 32
"""The rank of a predictor is filled up to a multiple of it."""
Floats = npt.NDArray[np.float32]


def file_predictor(
    file: GGUFFile, spec: DecoderSpec, weights: DecoderWeights, layer: int
) -> NeuronPredictor | None:
    """The predictor of a layer in the model's file; None: it has none.

    PowerInfer's read the input before the norm. The kernel reads the normed input, so the weights of the norm
    are divided out here.

    Raises:
        UnsupportedModelError: matrices of other shapes, or the norm isn't a root mean square.
    """
    index = sparse_index(spec, layer)
    if not isinstance(file, PowerInferFile) or index is None or (found := file.predictor(layer)) is None:
        return None
    first, second = found
    residual, norm = weights.residual(index), spec.residual(index).norm
    neurons, width = residual.block.ffn_up.rows, residual.block.ffn_up.columns
    shapes, wanted = (first.shape, second.shape), ((len(first), width), (neurons, len(first)))
    if shapes != wanted or not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise UnsupportedModelError(
            f"blk.{layer}.fc1.weight, fc2.weight: shapes {shapes[0]}, {shapes[1]}, wanted finite numbers of "
            f"shapes {wanted[0]}, {wanted[1]}"
        )
    if not isinstance(norm, NormSpec) or norm.kind != "rms":
        raise UnsupportedModelError(f"blk.{layer}.fc1.weight: a predictor before a norm that isn't RMS")
    divisor = residual.norm
    folded = first
    if divisor is not None:
        folded = np.divide(first, divisor, where=divisor != 0, out=np.zeros_like(first))
    missing = -len(first) % RANKS
    folded, second = np.pad(folded, ((0, missing), (0, 0))), np.pad(second, ((0, 0), (0, missing)))
    bias = np.full(neurons, -file.threshold, np.float32)
    return replace(stored_predictor(folded, second, bias), rectified=True)
