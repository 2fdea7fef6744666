"""The config of experts, and how it is read from metadata."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.architecture import Architecture
from edgeinfer.model_config.architectures import ARCHITECTURES
from edgeinfer.model_config.metadata_reader import MetadataReader
from edgeinfer_kernels.blocks.moe import Gating

MAX_LAYERS = 4096
MAX_EXPERTS = 1024
GATINGS: dict[int, Gating] = {1: "softmax", 2: "sigmoid", 3: "softmax_of_selected"}
"""The meaning of expert_gating_func values."""


@dataclass(frozen=True)
class ExpertsConfig:
    """The MoE config, the same in all layers after the first `dense_layers`."""

    count: int
    experts_per_token: int
    feed_forward: int
    """Length of an expert's intermediate activations; `shared`: of the shared expert's, 0: there is none."""
    shared: int
    gating: Gating
    normalized: bool
    scale: float
    dense_layers: int
    latent: int = 0
    """Elements of the latent projection that experts read; 0: they read the hidden states."""
    groups: int = 1
    groups_per_token: int = 1
    """Groups of experts, and how many of them the experts of a token are selected from."""


class ExpertsReader(MetadataReader):
    """Reads the config of the experts of one architecture."""

    def __init__(
        self,
        metadata: Mapping[str, Any],
        routed_layers: Collection[int] | None,
        architecture: Architecture | None = None,
    ) -> None:
        super().__init__(metadata)
        if architecture is None and self.name not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"architecture {self.name} isn't one of the {len(ARCHITECTURES)} that edgeinfer runs "
                "(docs/user/models.md lists them); "
                "llama.cpp may: add engine='llama.cpp' (pip install 'edgeinfer[llama-cpp]')"
            )
        self.architecture_spec = architecture or ARCHITECTURES[self.name]
        by_router = self.architecture_spec.experts == "by_router"
        self.routed_layers = routed_layers if by_router else None

    def per_layer(self, key: str, layers: int, default: int | None = None, minimum: int = 1) -> list[int]:
        """One number for all layers, or an array with one per layer."""
        value = self.get(key, default)
        values = value.tolist() if isinstance(value, np.ndarray) else [value] * layers
        if len(values) == layers + self.draft_heads():
            values = values[:layers]
        if len(values) != layers or not all(type(v) is int and minimum <= v < 1 << 24 for v in values):
            expected = "a positive number" if minimum else "a number"
            raise self.refused(key, value, f"{expected}, or one for each of {layers} layers")
        return values

    def draft_heads(self) -> int:
        """Number of draft heads (MTP) after the layers."""
        return self.count("nextn_predict_layers", 0, minimum=0, maximum=MAX_LAYERS)

    def experts(self, layers: int, width: int) -> ExpertsConfig | None:
        """The MoE config; None: the model is dense."""
        kind = self.architecture_spec.experts
        maximum = 0 if kind == "never" else MAX_EXPERTS
        count = self.count("expert_count", 0, minimum=int(kind == "always"), maximum=maximum)
        if count == 0 or (self.routed_layers is not None and not self.routed_layers):
            return None
        latent = self.count("moe_latent_size", 0, minimum=0, maximum=width)
        if latent % 16 or (latent and not self.architecture_spec.latent_experts):
            expected = "a multiple of 16" if latent % 16 else "experts without a latent projection"
            raise self.refused("moe_latent_size", latent, expected)
        experts_per_token = self.count("expert_used_count", maximum=count)
        groups, groups_per_token = self.expert_groups(count, experts_per_token)
        return ExpertsConfig(
            count=count,
            experts_per_token=experts_per_token,
            feed_forward=self.expert_length(layers, experts_per_token),
            shared=self.shared_length(layers, experts_per_token),
            gating=self.gating(),
            normalized=self.weights_normalized(),
            scale=self.factor("expert_weights_scale") or 1.0,
            dense_layers=self.count("leading_dense_block_count", 0, minimum=0, maximum=layers),
            latent=latent,
            groups=groups,
            groups_per_token=groups_per_token,
        )

    def expert_groups(self, count: int, experts_per_token: int) -> tuple[int, int]:
        """The number of groups of experts, and of those that a token's experts are selected from."""
        groups = self.count("expert_group_count", 1, minimum=0)
        if groups <= 1:
            return 1, 1
        if not self.architecture_spec.expert_groups:
            raise self.refused("expert_group_count", groups, "no groups of experts")
        size = count // groups
        if count % groups or size < 2:
            raise self.refused("expert_group_count", groups, f"{count} experts in groups of two or more")
        if self.gating() == "softmax_of_selected":
            raise self.refused("expert_group_count", groups, "no groups of experts with gating function 3")
        used = self.count("expert_group_used_count", maximum=groups)
        if used * size < experts_per_token:
            raise self.refused(
                "expert_group_used_count", used, f"groups with {experts_per_token} experts for a token"
            )
        return groups, used

    def weights_normalized(self) -> bool:
        given = self.architecture_spec.expert_weights_normalized
        return bool(self.get("expert_weights_norm", False)) if given is None else given

    def expert_length(self, layers: int, experts_per_token: int) -> int:
        if self.get("expert_feed_forward_length") is not None:
            return self.count("expert_feed_forward_length", maximum=1 << 24)
        length = max(self.per_layer("feed_forward_length", layers, minimum=0))
        return (
            max(1, length // experts_per_token) if self.architecture_spec.expert_length_by_share else length
        )

    def shared_length(self, layers: int, experts_per_token: int) -> int:
        if self.architecture_spec.shared_expert in ("none", "dense"):
            return 0
        length = self.count("expert_shared_feed_forward_length", 0, minimum=0, maximum=1 << 24)
        default = self.architecture_spec.default_shared_count
        shared = self.count("expert_shared_count", default, minimum=0, maximum=MAX_EXPERTS)
        if length and shared and self.architecture_spec.shared_length_of_one:
            return shared * length
        if not length and shared:
            return shared * self.expert_length(layers, experts_per_token)
        if not length and self.architecture_spec.shared_expert == "gated":
            return self.count("feed_forward_length", maximum=1 << 24)
        return length

    def gating(self) -> Gating:
        spec = self.architecture_spec
        if spec.gating is not None:
            return spec.gating
        if spec.default_gating is not None and self.get("expert_gating_func") is None:
            return spec.default_gating
        return GATINGS[self.count("expert_gating_func", maximum=len(GATINGS))]
