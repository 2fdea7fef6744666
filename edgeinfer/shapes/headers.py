"""The header that a file of a shape would have: metadata, and tensors with their formats."""

from typing import Any

import numpy as np

from edgeinfer.shapes.shape import Shape
from edgeinfer_quant_formats import FORMATS, TensorInfo, block_format
from edgeinfer_quant_formats.gguf.described_file import DescribedFile
from edgeinfer_quant_formats.quantizer.mix_rules import SourceModel
from edgeinfer_quant_formats.quantizer.mixes import ALIASES, MIXES, Mix, find_mix
from edgeinfer_quant_formats.quantizer.type_selection import TypeOptions, select_types

UNLISTED = 1024
"""llama.cpp's file type of a file whose type is guessed from its tensors."""
SIGMOID = 2
"""llama.cpp's number of this gating function of experts."""


def shape_header(shape: Shape, kind: str) -> DescribedFile:
    """The header of a file of this shape and type. Raises `FormatError` for an unknown type."""
    formats = matrix_formats(shape, kind)
    tensors = [_tensor(name, size, formats[name]) for name, size in shape.matrices().items()]
    for name, length in shape.vectors().items():
        size = shape.recurrent.dimensions(name, length) if shape.recurrent else (length,)
        tensors.append(_tensor(name, size, "F32"))
    known = {
        key: np.array(value) if isinstance(value, list) else value
        for key, value in shape_metadata(shape).items()
    }
    return DescribedFile(f"{shape.name}-{kind.upper()}", known, tensors)


def _tensor(name: str, size: tuple[int, ...], kind: str) -> TensorInfo:
    spec = block_format(kind)
    return TensorInfo(name, size, spec, 0, spec.nbytes(size), 0)


def matrix_formats(shape: Shape, kind: str) -> dict[str, str]:
    """Name -> format of every matrix, as the quantizer selects them.

    For a shape without experts, a mix for MoE models uses its base format for all matrices except the head.
    A format that the quantizer doesn't write is treated as a mix without further rules.
    Raises `FormatError` for an unknown mix.
    """
    mix, float32, eight_bits = _mix(kind), block_format("F32"), block_format("Q8_0")
    source_model = SourceModel(
        shape.architecture,
        shape.layers + shape.draft_head,
        shape.heads // max(1, shape.kv_heads),
        shape.experts,
        tied_output=shape.tied,
    )
    tensors = [TensorInfo(name, size, float32, 0, 0, 0) for name, size in shape.matrices().items()]
    options = None
    if mix.experts_only and not shape.experts:
        options = TypeOptions(pure=True, output=eight_bits, embedding=eight_bits if shape.tied else None)
    return {
        name: selection.format.name
        for name, selection in select_types(tensors, source_model, mix, options).items()
    }


def _mix(kind: str) -> Mix:
    """The mix of that name, or one that has only the format of that name."""
    name = kind.upper()
    spec = FORMATS.get(name)
    if spec is None or not spec.is_quantized or name in MIXES or name in ALIASES:
        return find_mix(kind)
    return Mix(name, UNLISTED, name, 8 * spec.block_bytes / spec.block_elements)


def shape_metadata(shape: Shape) -> dict[str, Any]:
    """The metadata of a file of this shape, without name and vocabulary."""
    own: dict[str, Any] = {
        "context_length": shape.context,
        "embedding_length": shape.width,
        "block_count": shape.layers + shape.draft_head,
        "feed_forward_length": shape.dense_feed_forward or shape.feed_forward,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    if shape.heads:
        own |= dict.fromkeys(("attention.key_length", "attention.value_length"), shape.head_size)
        own |= {"rope.dimension_count": shape.head_size, "rope.freq_base": shape.rope_base}
    if shape.expert_bias:
        own |= {"expert_weights_norm": True, "expert_gating_func": SIGMOID}
    if shape.dense_layers:
        own["leading_dense_block_count"] = shape.dense_layers
    if shape.draft_head:
        own["nextn_predict_layers"] = 1
    if shape.latent:
        own |= shape.latent.metadata()
    if shape.recurrent:
        own |= shape.recurrent.metadata(shape.layers)
    if shape.gemma4:
        own |= shape.gemma4.metadata(shape.layers, shape.kv_heads)
        if shape.gemma4.doubled:
            times = map(shape.gemma4.times, range(shape.layers))
            own["feed_forward_length"] = [each * shape.feed_forward for each in times]
    if shape.encoder:
        own |= shape.encoder.metadata()
    if shape.shared_expert:
        own |= {"expert_shared_feed_forward_length": shape.shared_expert, "expert_shared_count": 1}
    if shape.experts:
        own["expert_count"], own["expert_used_count"] = shape.experts, shape.experts_per_token
        own["expert_feed_forward_length"] = shape.feed_forward
    own |= dict(shape.keys)
    return {
        "general.architecture": shape.architecture,
        **{f"{shape.architecture}.{key}": value for key, value in own.items()},
    }
