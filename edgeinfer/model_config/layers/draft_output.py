"""The output of a draft head and the token ids of its rows: ids that its file lists, or the first ids."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.weights import FileTensors
from edgeinfer_kernels.matrix import Matrix

GROUP_ROWS = 16
MAX_WHOLE_VOCABULARY = 1 << 16
"""Of a larger vocabulary the first half is drafted, so that the output costs half as much: ids of byte pairs
are in the order of their frequency. Of Qwen2's 151,936 ids the first half is 99 % of English text, 98 % of
Python code, and 94 % of text in several languages."""


@dataclass(frozen=True)
class DraftOutput:
    """The output of a draft head: the rows that it uses, and their token ids (None: the first ones).
    is_own: it is in the head's file, not shared with the target.
    """

    matrix: Matrix
    ids: npt.NDArray[np.int64] | None
    is_own: bool


def read_output(tensors: FileTensors, name: str, vocabulary: int, width: int, shared: Matrix) -> DraftOutput:
    """The output of this name, or else the `shared` one; the target has this vocabulary.

    Raises:
        UnsupportedModelError: the file lists ids, but has no output whose rows they belong to.
    """
    ids = _listed_ids(tensors, vocabulary)
    own = tensors.matrix(f"{name}.weight", (vocabulary if ids is None else len(ids), width))
    if own is None and ids is not None:
        raise UnsupportedModelError(f"draft head: d2t without {name}.weight, wanted both or none")
    rows = _first_ids(vocabulary) if ids is None else len(ids)
    return DraftOutput(first_rows(own or shared, rows), ids, own is not None)


def _first_ids(vocabulary: int) -> int:
    """How many first ids are drafted, of a model with this vocabulary."""
    if vocabulary <= MAX_WHOLE_VOCABULARY:
        return vocabulary
    return -(-vocabulary // (2 * GROUP_ROWS)) * GROUP_ROWS


def first_rows(output: Matrix, rows: int) -> Matrix:
    """The first rows of an output; the matrix itself if they are all."""
    return output if rows == output.rows else output.take_rows(0, rows)


def _listed_ids(tensors: FileTensors, vocabulary: int) -> npt.NDArray[np.int64] | None:
    """The token ids that a file lists for the rows of its output; None: it lists none."""
    info = tensors.info("d2t")
    if info is None:
        return None
    if info.format.name != "I64" or len(info.shape) != 1:
        raise UnsupportedModelError(
            f"d2t: type {info.format.name}, shape {info.shape}, wanted I64 ids of one dimension; convert the "
            "head again with llama.cpp's convert_hf_to_gguf.py"
        )
    if tensors.shapes_only:
        return np.arange(info.shape[0])
    ids = tensors.file.raw("d2t").reshape(-1).view(np.int64)
    if wrong := ids[(ids < 0) | (ids >= vocabulary)][:1].tolist():
        raise UnsupportedModelError(f"d2t: id {wrong[0]}, wanted 0 to {vocabulary - 1}, the ids of the model")
    if len(np.unique(ids)) != len(ids):
        raise UnsupportedModelError("d2t: an id occurs twice, wanted each once")
    return ids.copy()
