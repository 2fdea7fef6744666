"""Reads a GGUF file's tensors as weights for the backends; checks every name and shape."""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.architecture import Architecture
from edgeinfer.model_config.config import ModelConfig
from edgeinfer.model_config.config_reader import config_from_metadata
from edgeinfer.model_config.encoders import position_rows, with_file_activation
from edgeinfer.model_config.pooling_head import DENSE_TENSORS, HEAD_TENSORS
from edgeinfer.model_config.rope_scaling import Factors
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights, LayerWeights
from edgeinfer_kernels.matrix import Matrix, Vector
from edgeinfer_quant_formats import GGUFFile, TensorInfo
from edgeinfer_quant_formats.formats import non_finite_error

SCALED = re.compile(
    r"(blk\.\d+\.)?(attn_(q|k|v|output|qkv|gate)|ffn_(gate|up|down)(_exps|_shexp)?|ssm_(in|out|alpha|beta)"
    r"|output)\.weight"
)
"""Matrices that may have a factor, NAME.scale, in files of NVFP4."""
HEAD_FILE_TYPE = "draft_head"
"""`general.type` of a file that has only a draft head."""
EAGLE, MEDUSA, ASSISTANT, DFLASH = "eagle3", "medusa", "gemma4-assistant", "dflash"
"""The architectures of files that have only an EAGLE-3 head, Medusa heads, a Gemma 4 assistant, or a block
drafter."""
LAYER, HEAD_LAYER = re.compile(r"blk\.(\d+)\."), re.compile(r"blk\.(\d+)\.nextn\.eh_proj\.weight")
"""The names of the tensors of a layer, and of the one that each layer of a draft head (MTP) has."""
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def rope_factors(file: GGUFFile, config: ModelConfig, context: int) -> Factors | None:
    """The file's divisors of the RoPE frequencies, (rope_dim/2,) float32.

    LongRoPE has two sets, selected by the context in use.

    Raises:
        UnsupportedModelError: not one factor per pair, or one that isn't above 0.
    """
    long_context = context > config.rope_scaling.original_context
    name = "rope_factors_long.weight" if long_context else "rope_factors_short.weight"
    if "rope_freqs.weight" in file.tensors:
        name = "rope_freqs.weight"
    if name not in file.tensors:
        return None
    factors = file.decode(name).reshape(-1)
    pairs = max(config.rope_dim, config.window_rope_dim) // 2
    if len(factors) != pairs:
        raise UnsupportedModelError(f"{name}: {len(factors)} factors, wanted {pairs}")
    wrong = factors[~(np.isfinite(factors) & (factors > 0))]
    if len(wrong):
        raise UnsupportedModelError(f"{name}: a factor of {wrong[0]}, wanted finite numbers above 0")
    return factors[: config.rope_dim // 2]


class FileTensors:
    """Reads the tensors of a file by name, and records which ones.

    `needed_by`: the architecture, as errors name it. `shapes_only`: matrices and vectors have the right
    shapes, but no content; nothing beyond the header of the file is read.
    """

    def __init__(self, file: GGUFFile, needed_by: str, *, shapes_only: bool = False) -> None:
        self.file = file
        self.needed_by = needed_by
        self.shapes_only = shapes_only
        self.taken = {*ROPE_TENSORS, *HEAD_TENSORS, *DENSE_TENSORS}
        self._of_matrices: set[str] = set()
        """Scales that matrices have: no block applies them again."""

    def info(self, name: str) -> TensorInfo | None:
        """The entry of a tensor in the file's index, which counts as read."""
        tensor = self.file.tensors.get(name)
        if tensor is not None:
            self.taken.add(name)
        return tensor

    def missing(self, name: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{name} is missing: {self.needed_by} needs it")

    def matrix(self, name: str, shape: tuple[int, ...]) -> Matrix | None:
        """The tensor of (rows, columns) or (experts, rows, columns); None: there is none."""
        info = self.info(name)
        if info is None:
            return None
        if info.shape != shape:
            raise UnsupportedModelError(f"{name}: shape {info.shape}, wanted {shape}")
        *experts, rows, columns = shape
        count = experts[0] if experts else 1
        if self.shapes_only:
            raw = np.broadcast_to(np.uint8(0), (count * rows, info.format.row_bytes(columns)))
        else:
            raw = self.file.raw(name).reshape(count * rows, -1)
        scales = self._scales(name, info, count)
        return Matrix(name, info.format.name, rows, columns, raw, count, scales=scales)

    def _scales(self, name: str, info: TensorInfo, experts: int) -> Vector | None:
        """The factors of a matrix of NVFP4, NAME.scale, one for each expert; None: there are none.

        NAME.input_scale, for activations in four bits, is not needed.
        """
        if info.format.name != "NVFP4" or not SCALED.fullmatch(name):
            return None
        scale = f"{name.removesuffix('weight')}scale"
        self.info(f"{name.removesuffix('weight')}input_scale")
        found = self.vector(scale, experts)
        self._of_matrices.add(scale)
        return found

    def vector(self, name: str, length: int) -> Vector | None:
        """The tensor in float32; None: there is none."""
        info = None if name in self._of_matrices else self.info(name)
        if info is None:
            return None
        if int(np.prod(info.shape)) != length:
            raise UnsupportedModelError(f"{name}: shape {info.shape}, wanted ({length},)")
        if self.shapes_only:
            return np.broadcast_to(np.float32(0), (length,))
        values = self.file.decode(name).reshape(-1)
        if not np.isfinite(values).all():
            wrong = int(np.flatnonzero(~np.isfinite(values))[0])
            raise non_finite_error(name, f"element {wrong}")
        return values

    def leave_layer(self, layer: int) -> None:
        """The tensors of this layer, a draft head, stay in the file."""
        prefix = f"blk.{layer}."
        self.taken |= {name for name in self.file.tensors if name.startswith(prefix)}

    def check_all_used(self) -> None:
        """Raise an error for unused tensors: ignoring one would give wrong results."""
        left = [name for name in self.file.tensors if name not in self.taken]
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise UnsupportedModelError(
                f"{self.needed_by} doesn't use {', '.join(left[:3])}{more}; "
                "llama.cpp may: add engine='llama.cpp'"
            )


class LayerTensors:
    """The tensors of one layer by their names without the prefix, as `TensorReader`."""

    def __init__(self, tensors: FileTensors, layer: int, hidden_size: int) -> None:
        self._tensors = tensors
        self._prefix = f"blk.{layer}."
        self.hidden_size = hidden_size

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        tensor = self.matrix_or_none(name, rows, columns)
        if tensor is None:
            raise self._tensors.missing(f"{self._prefix}{name}.weight")
        return tensor

    def matrix_or_none(self, name: str, rows: int, columns: int) -> Matrix | None:
        return self._tensors.matrix(f"{self._prefix}{name}.weight", (rows, columns))

    def alternating(self, names: Sequence[str], rows: int, columns: int, run: int) -> Matrix:
        found = [self.matrix(name, rows, columns) for name in names]
        first, (total, width) = found[0], (len(found) * rows, found[0].raw.shape[1])
        for other in found[1:]:
            if other.format != first.format:
                raise UnsupportedModelError(
                    f"{other.name}: type {other.format}, wanted {first.format} as {first.name}; "
                    "llama.cpp reads both: add engine='llama.cpp'"
                )
        scaled = [each.name for each in found if each.scales is not None]
        if scaled:
            raise UnsupportedModelError(
                f"{scaled[0]}: its factor, .scale, can't be applied where rows of {' and '.join(names)} "
                "alternate; llama.cpp reads them: add engine='llama.cpp'"
            )
        if self._tensors.shapes_only:
            raw = np.broadcast_to(np.uint8(0), (total, width))
        else:
            runs = [each.raw.reshape(-1, run, width) for each in found]
            raw = np.concatenate(runs, axis=1).reshape(total, width)
        return replace(first, rows=total, raw=raw)

    def scaled_matrix(self, name: str, rows: int, factors: Vector) -> Matrix:
        found, columns = self.matrix(name, rows, len(factors)), len(factors)
        if self._tensors.shapes_only:
            raw = np.broadcast_to(np.uint8(0), (rows, 4 * columns))
        else:
            raw = np.ascontiguousarray(found.decoded() * factors, np.float32).view(np.uint8)
        return Matrix(found.name, "F32", rows, columns, raw)

    def experts(self, name: str, count: int, rows: int, columns: int) -> Matrix:
        full = f"{self._prefix}{name}.weight"
        tensor = self._tensors.matrix(full, (count, rows, columns))
        if tensor is None:
            raise self._tensors.missing(full)
        return tensor

    def expert_pairs(self, name: str, count: int, rows: int, columns: int) -> tuple[Matrix, Matrix] | None:
        whole = self._tensors.matrix(f"{self._prefix}{name}.weight", (count, 2 * rows, columns))
        if whole is None:
            return None
        separate = replace(whole, rows=rows, experts=2 * count)
        return separate.take_experts(range(0, 2 * count, 2)), separate.take_experts(range(1, 2 * count, 2))

    def has_shape(self, name: str, rows: int, columns: int) -> bool:
        info = self._tensors.file.tensors.get(f"{self._prefix}{name}.weight")
        return info is not None and info.shape == (rows, columns)

    def vector(self, name: str, length: int) -> Vector | None:
        return self._tensors.vector(f"{self._prefix}{name}", length)

    def required(self, name: str, length: int) -> Vector:
        tensor = self.vector(name, length)
        if tensor is None:
            raise self._tensors.missing(f"{self._prefix}{name}")
        return tensor

    def model_matrix(self, name: str, rows: int, columns: int) -> Matrix:
        found = self._tensors.matrix(f"{name}.weight", (rows, columns))
        if found is None:
            raise self._tensors.missing(f"{name}.weight")
        return found

    def model_experts(self, name: str, count: int, rows: int, columns: int) -> Matrix:
        found = self._tensors.matrix(f"{name}.weight", (count, rows, columns))
        if found is None:
            raise self._tensors.missing(f"{name}.weight")
        return found

    def nonzero(self, name: str, length: int) -> Vector:
        tensor = self.required(name, length)
        if self._tensors.shapes_only:
            return np.ones_like(tensor)
        if not tensor.all():
            wrong = int(np.flatnonzero(tensor == 0)[0])
            raise UnsupportedModelError(f"{self._prefix}{name}: element {wrong} is 0, wanted other numbers")
        return tensor

    def model_vector(self, name: str, length: int) -> Vector:
        found = self._tensors.vector(name, length)
        if found is None:
            raise self._tensors.missing(name)
        return found

    def model_vector_or_none(self, name: str, length: int) -> Vector | None:
        return self._tensors.vector(name, length)


def is_head_file(file: GGUFFile) -> bool:
    """Whether a file has only a draft head."""
    is_named = any(file.has_text("general.architecture", name) for name in (EAGLE, ASSISTANT, DFLASH))
    return is_named or file.has_text("general.type", HEAD_FILE_TYPE) or _has_only_head_layers(file)


def has_head_layers(file: GGUFFile) -> bool:
    """Whether a file has the tensors of a draft head (MTP) besides the layers that its metadata count."""
    return any(map(HEAD_LAYER.match, file.tensors))


def _has_only_head_layers(file: GGUFFile) -> bool:
    """Whether all layers in a file are draft heads, as in those of llama.cpp's converters with `--mtp`; they
    also have the target's embedding, norm and output.
    """
    heads = {match[1] for match in map(HEAD_LAYER.match, file.tensors) if match}
    return bool(heads) and all(match[1] in heads for match in map(LAYER.match, file.tensors) if match)


def embedding_rows(file: GGUFFile) -> int:
    """The vocabulary size, from the embedding's shape.

    Raises:
        UnsupportedModelError: the file has no embedding.
    """
    if file.has_text("general.type", "adapter"):
        raise UnsupportedModelError(
            f"{file.path.name}: a LoRA adapter, wanted a model; add it to one with --lora (lora=)"
        )
    if is_head_file(file):
        raise UnsupportedModelError(
            f"{file.path.name}: a draft head, wanted a model; it drafts for one (draft=)"
        )
    info = file.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        problem = "is missing" if info is None else f"has shape {info.shape}"
        raise UnsupportedModelError(
            f"{file.path.name}: token_embd.weight {problem}; this file is no language model"
        )
    return info.shape[0]


def routed_layers(file: GGUFFile) -> frozenset[int]:
    """The layers of a file that have a router."""
    routers = re.compile(r"blk\.(\d+)\.ffn_gate_inp\.weight")
    return frozenset(int(match[1]) for match in map(routers.fullmatch, file.tensors) if match)


def read_config(file: GGUFFile) -> ModelConfig:
    """The config of a file's model, from its metadata and the shapes of its tensors.

    Raises:
        UnsupportedModelError: as `config_from_metadata` and `embedding_rows`.
    """
    config = config_from_metadata(file.metadata, embedding_rows(file), routed_layers(file))
    config = with_file_activation(config, file.metadata)
    spec = _with_file_gates(config, file)
    config = replace(config, architecture_spec=spec)
    if spec.qk_norm_optional and "blk.0.attn_q_norm.weight" not in file.tensors:
        return replace(config, architecture_spec=replace(spec, qk_norm="none"))
    if spec.own_norms == "by_tensor" and "blk.0.attn_norm_2.weight" in file.tensors:
        named = replace(spec, attention_norm="attn_norm_2", feed_forward_norm="attn_norm")
        return replace(config, own_norms=True, architecture_spec=named)
    if spec.positions == "by_tensor":
        return replace(config, has_positions="position_embd.weight" in file.tensors)
    return config


def _with_file_gates(config: ModelConfig, file: GGUFFile) -> Architecture:
    """The architecture with the kind of gates of attention that the file has."""
    spec, info = config.architecture_spec, file.tensors.get("blk.0.attn_gate.weight")
    if spec.head_gate == "never":
        return spec
    if info is None:
        return spec if spec.head_gate == "always" else replace(spec, head_gate="never")
    if info.shape[0] == config.shapes[0].heads * config.head_dim:
        return replace(spec, head_gate="never", attention_gate=True)
    return spec


def read_decoder(tensors: FileTensors, spec: DecoderSpec) -> DecoderWeights:
    """All weights of the decoder that `spec` describes.

    Raises:
        UnsupportedModelError: a missing or misshapen tensor.
    """
    width, shape = spec.hidden_size, (spec.vocabulary_size, spec.hidden_size)
    embedding = tensors.matrix("token_embd.weight", shape)
    norm_name = f"{spec.norm_name}.weight"
    has_weights = spec.norm.has_weights
    output_norm = tensors.vector(norm_name, width) if has_weights else np.ones(width, np.float32)
    for name, tensor in (("token_embd.weight", embedding), (norm_name, output_norm)):
        if tensor is None and name != ".weight":
            raise tensors.missing(name)
    assert embedding is not None
    layers = []
    for index, layer in enumerate(spec.layers):
        reader = LayerTensors(tensors, index, width)
        layers.append(LayerWeights(tuple(residual.read(reader) for residual in layer.blocks)))
    return DecoderWeights(
        token_embd=embedding,
        output=tensors.matrix("output.weight", shape) or embedding,
        output_norm=output_norm,
        output_norm_bias=tensors.vector(f"{spec.norm_name}.bias", width),
        layers=tuple(layers),
        output_bias=tensors.vector("output.bias", spec.vocabulary_size),
        per_layer_token_embd=_per_layer_embeddings(tensors, spec),
    )


def _per_layer_embeddings(tensors: FileTensors, spec: DecoderSpec) -> Matrix | None:
    """The per-layer embeddings; None: the model has none."""
    if not spec.per_layer_width:
        return None
    name, columns = "per_layer_token_embd.weight", len(spec.layers) * spec.per_layer_width
    found = tensors.matrix(name, (spec.vocabulary_size, columns))
    if found is None:
        raise tensors.missing(name)
    return found


def read_weights(file: GGUFFile, config: ModelConfig, *, shapes_only: bool = False) -> DecoderWeights:
    """All of a decoder's weights, matrices as views of the memory map.

    Raises:
        UnsupportedModelError: a missing, misshapen or unexpected tensor.
    """
    tensors = FileTensors(file, f"architecture {config.architecture}", shapes_only=shapes_only)
    weights = read_decoder(tensors, config.specification())
    weights = replace(weights, position_rows=position_rows(tensors, config))
    for head in range(config.draft_heads):
        tensors.leave_layer(len(config.shapes) + head)
    tensors.check_all_used()
    return weights
