"""Chooses the format of each tensor of a model under a mix."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from edgeinfer_quant_formats.errors import FormatError, printable
from edgeinfer_quant_formats.formats import FORMATS, FormatSpec, block_format
from edgeinfer_quant_formats.gguf.tensor_index import TensorInfo
from edgeinfer_quant_formats.quantizer.mix_rules import SourceModel, TensorPosition
from edgeinfer_quant_formats.quantizer.mixes import Mix, rules_of
from edgeinfer_quant_formats.quantizer.tensor_roles import (
    PER_LAYER_EMBEDDING,
    Role,
    is_quantized,
    layer_of,
    role_of,
)

_LAST_FALLBACK = "F16"
_RAISED_IN_70B = {"Q3_K": "Q5_K", "Q4_K": "Q5_K"}
_Q8_0_IN_ARCHITECTURE = {"glm5-next": ("attn_q_a", "attn_q_b", "nextn.eh_proj")}
_FEED_FORWARD = (Role.FFN_DOWN, Role.FFN_GATE, Role.FFN_UP)
_EXPERT_ROLES_OF_ARCHITECTURE = {"bailingmoe3": _FEED_FORWARD}


@dataclass(frozen=True, slots=True)
class Override:
    """Tensors whose name contains a match of the regular expression `pattern` get `format`."""

    pattern: re.Pattern[str]
    format: FormatSpec


@dataclass(frozen=True, slots=True)
class TypeOptions:
    """User overrides of the mix."""

    pure: bool = False
    """Every tensor gets the base format of the mix."""
    output: FormatSpec | None = None
    embedding: FormatSpec | None = None
    overrides: tuple[Override, ...] = ()


@dataclass(frozen=True, slots=True)
class TypeSelection:
    """The format of a tensor, and the one that it would have if its rows filled whole blocks."""

    format: FormatSpec
    requested: FormatSpec


def select_types(
    tensors: Iterable[TensorInfo], model: SourceModel, mix: Mix, options: TypeOptions | None = None
) -> dict[str, TypeSelection]:
    """The format of each tensor by name; tensors that are never quantized keep theirs.

    Raises:
        FormatError: a format requested by name whose blocks the tensor's rows can't fill, a layer beyond the
            model's last.
    """
    by_layer = sorted(tensors, key=lambda info: (layer_of(info.name), info.name))
    chooser = _TypeSelector(model, mix, options or TypeOptions())
    for info in by_layer:
        chooser.role_counts[role_of(info.name)] += 1
    return {info.name: chooser.choose(info) for info in by_layer}


@dataclass
class _TypeSelector:
    """Processes the tensors layer by layer and counts those of each role."""

    model: SourceModel
    mix: Mix
    options: TypeOptions
    role_counts: Counter[Role] = field(default_factory=Counter)
    seen: Counter[Role] = field(default_factory=Counter)

    def choose(self, info: TensorInfo) -> TypeSelection:
        if not is_quantized(info.name, info.shape, self.model.architecture):
            return TypeSelection(info.format, info.format)
        role = role_of(info.name)
        override = next(
            (each.format for each in self.options.overrides if each.pattern.search(info.name)), None
        )
        named_itself = info.name == PER_LAYER_EMBEDDING and override is not None
        if role is Role.TOKEN_EMBEDDING and self.options.embedding is not None and not named_itself:
            return _as_requested(info, self.options.embedding)
        if role is Role.OUTPUT and self.options.output is not None:
            return _as_requested(info, self.options.output)
        base = FORMATS[self.mix.base]
        requested = override or (base if self.options.pure else self._by_mix(info, role))
        return TypeSelection(fitting_format(requested, info.shape[-1]), requested)

    def _by_mix(self, info: TensorInfo, role: Role) -> FormatSpec:
        base, architecture = FORMATS[self.mix.base], self.model.architecture
        if base.block_elements == 1:
            return base
        if any(part in info.name for part in _Q8_0_IN_ARCHITECTURE.get(architecture, ())):
            return FORMATS["Q8_0"]
        if role is Role.OUTPUT or (role is Role.TOKEN_EMBEDDING and self.model.tied_output):
            return self.options.output or self._of_output(info.shape[-1])
        if self.mix.experts_only:
            roles = _EXPERT_ROLES_OF_ARCHITECTURE.get(architecture, tuple(Role))
            is_expert = len(info.shape) > 2 and info.shape[-3] > 1 and role in roles
            return base if is_expert else FORMATS["Q8_0"]
        position = self._position(info.name, role)
        rule = next((rule for rule in rules_of(self.mix) if rule.holds(role, position, self.model)), None)
        name = rule.format if rule else self.mix.base
        if role is Role.ATTENTION_VALUE and self.model.is_70b and not self.mix.is_lowest:
            name = _RAISED_IN_70B.get(name, name)
        return FORMATS[name]

    def _of_output(self, columns: int) -> FormatSpec:
        """The output matrix processes every token: 6 bits at least, 5 in the smallest mixes."""
        base = FORMATS[self.mix.base]
        eight_bits = (
            self.mix.experts_only
            or base.name == "Q8_0"
            or self.model.architecture == "falcon"
            or columns % base.block_elements
        )
        return FORMATS["Q8_0" if eight_bits else self.mix.output]

    def _position(self, name: str, role: Role) -> TensorPosition:
        index, count = self.seen[role], self.role_counts[role]
        self.seen[role] += 1
        before = index
        if role not in _FEED_FORWARD:
            return TensorPosition(index, count, before)
        if self.model.experts > 1:
            # Files may have a tensor per expert, so the number of tensors isn't the number of layers.
            index = layer_of(name)
            if not 0 <= index < self.model.layers:
                raise FormatError(
                    f"{printable(name)}: layer {index}, wanted 0 to {self.model.layers - 1}, "
                    f"by the layer count in the metadata"
                )
        return TensorPosition(index, self.model.layers, before)


def fitting_format(requested: FormatSpec, columns: int) -> FormatSpec:
    """`requested`, or its fallback for rows of `columns` weights that don't fill its blocks, at last F16."""
    if columns % requested.block_elements == 0:
        return requested
    smaller = FORMATS[requested.fallback]
    return smaller if columns % smaller.block_elements == 0 else FORMATS[_LAST_FALLBACK]


def unmatched(
    overrides: Iterable[Override], tensors: Mapping[str, TensorInfo], architecture: str
) -> list[str]:
    """The patterns that match no quantized tensor."""
    names = [name for name, info in tensors.items() if is_quantized(name, info.shape, architecture)]
    return [
        each.pattern.pattern for each in overrides if not any(each.pattern.search(name) for name in names)
    ]


def _as_requested(info: TensorInfo, requested: FormatSpec) -> TypeSelection:
    try:
        requested.row_bytes(info.shape[-1])
    except FormatError as error:
        raise FormatError(f"{printable(info.name)}: {error}") from None
    return TypeSelection(requested, requested)


def weight_format(name: str) -> FormatSpec:
    """The format with this name, if it can store weights.

    Raises:
        FormatError: an unknown format, or one for integers.
    """
    kind = block_format(name)
    if kind.name in ("I8", "I16", "I32", "I64", "F64"):
        raise FormatError(f"format {kind.name} is not for weights")
    return kind
