"""The building blocks of mixes: rules, their conditions, and the model properties that these use."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edgeinfer_quant_formats.errors import FormatError, printable
from edgeinfer_quant_formats.quantizer.tensor_roles import Role

ARCHITECTURE_KEY = "general.architecture"

# Layer counts of Llama 2 and 3 70B and models of their shape: 8 heads share a value, so that more bits there
# cost little.
_LAYERS_OF_70B = {"llama": 80, "llama-embed": 80, "qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}
_GROUPED_ONLY = ("llama", "llama-embed")


@dataclass(frozen=True, slots=True)
class SourceModel:
    """The model properties that determine the formats."""

    architecture: str
    layers: int
    heads_per_key: int = 1
    experts: int = 0
    has_importance: bool = False
    tied_output: bool = False
    """The token embedding is also the output matrix."""

    @property
    def is_70b(self) -> bool:
        if self.architecture in _GROUPED_ONLY and self.heads_per_key == 1:
            return False
        return _LAYERS_OF_70B.get(self.architecture) == self.layers

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], layers: int, has_importance: bool, tied_output: bool
    ) -> "SourceModel":
        """The properties of a file; `layers` is used if the metadata has no layer count.

        Raises:
            FormatError: a count that isn't an integer.
        """
        architecture = str(metadata.get(ARCHITECTURE_KEY, ""))

        def number(key: str, default: int) -> int:
            value = metadata.get(f"{architecture}.{key}", default)
            first = value if isinstance(value, int) or not hasattr(value, "__len__") else next(iter(value), 0)
            try:
                return int(first)
            except (TypeError, ValueError):
                shown = printable(f"{architecture}.{key}")
                raise FormatError(f"{shown}: {printable(value)}, wanted a whole number") from None

        heads = number("attention.head_count", 0)
        keys = number("attention.head_count_kv", heads)
        return cls(
            architecture=architecture,
            layers=number("block_count", layers),
            heads_per_key=heads // keys if keys > 0 else 0,
            experts=number("expert_count", 0),
            has_importance=has_importance,
            tied_output=tied_output,
        )


@dataclass(frozen=True, slots=True)
class TensorPosition:
    """The index of a tensor within its role: number `index` of `count`.

    `before`: the tensors of its role before it. In the feed-forward network of a model with experts, a layer
    has several, and `index` is the layer.
    """

    index: int
    count: int
    before: int


Condition = Callable[[TensorPosition, SourceModel], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """Tensors of `role` get `format` if all conditions are true."""

    role: Role
    format: str
    conditions: tuple[Condition, ...] = ()

    def holds(self, role: Role, position: TensorPosition, model: SourceModel) -> bool:
        return role is self.role and all(condition(position, model) for condition in self.conditions)


def first(count: int) -> Condition:
    """The first `count` tensors of the role."""
    return lambda position, model: position.index < count


def first_share(parts: int) -> Condition:
    """The first of `parts` equal parts of the layers."""
    return lambda position, model: position.index < position.count // parts


def first_share_of_tensors(parts: int) -> Condition:
    """As many tensors, from the first, as one of `parts` equal parts of the layers has layers."""
    return lambda position, model: position.before < position.count // parts


def middle(position: TensorPosition, model: SourceModel) -> bool:
    """All but the first and the last eighth of the layers."""
    return position.count // 8 <= position.index < 7 * position.count // 8


def more_bits(position: TensorPosition, model: SourceModel) -> bool:
    """The first and the last eighth of the layers, and every third between."""
    eighth = position.count // 8
    return (
        position.index < eighth
        or position.index >= 7 * position.count // 8
        or (position.index - eighth) % 3 == 2
    )


def four_heads_per_key(position: TensorPosition, model: SourceModel) -> bool:
    return model.heads_per_key >= 4


def four_experts(position: TensorPosition, model: SourceModel) -> bool:
    """Four or more."""
    return model.experts >= 4


def eight_experts(position: TensorPosition, model: SourceModel) -> bool:
    return model.experts == 8


def has_importance(position: TensorPosition, model: SourceModel) -> bool:
    return model.has_importance


def is_falcon(position: TensorPosition, model: SourceModel) -> bool:
    return model.architecture == "falcon"


def unless(condition: Condition) -> Condition:
    """The negated condition."""
    return lambda position, model: not condition(position, model)
