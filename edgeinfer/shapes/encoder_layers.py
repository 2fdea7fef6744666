"""What encoders have besides the tensors of a decoder: norms after sums, positions, token types."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeinfer.shapes.hybrid_layers import Matrices


@dataclass(frozen=True)
class EncoderLayers:
    """`normed_sums`: norms with biases follow the sums, and the embedding; else they precede the blocks.

    `positions`: learned rows; 0: none. `types`: rows of token types. `dense`: elements between two dense
    layers after pooling; 0: there are none. `scores`: a classifier follows.
    """

    normed_sums: bool = True
    positions: int = 0
    types: int = 0
    dense: int = 0
    scores: bool = False

    def outside(self, width: int) -> Matrices:
        """Name -> size of the matrices outside the layers, besides the embedding."""
        rows = {"position_embd.weight": self.positions, "token_types.weight": self.types}
        found: dict[str, tuple[int, ...]] = {name: (count, width) for name, count in rows.items() if count}
        if self.dense:
            found |= {"dense_2.weight": (self.dense, width), "dense_3.weight": (width, self.dense)}
        if self.scores:
            found |= {"cls.weight": (width, width), "cls.output.weight": (1, width)}
        return found

    def outside_vectors(self, width: int) -> Mapping[str, int]:
        """Name -> length of the vectors outside the layers."""
        norm = {"token_embd_norm.weight": width, "token_embd_norm.bias": width} if self.normed_sums else {}
        return {**norm, **({"cls.bias": width, "cls.output.bias": 1} if self.scores else {})}

    def norms(self, width: int) -> Mapping[str, int]:
        """Name within the layer -> length of the norms after sums."""
        names = ("attn_output_norm", "layer_output_norm")
        return {f"{name}.{part}": width for name in names for part in ("weight", "bias")}

    def metadata(self) -> Mapping[str, Any]:
        """Keys without the architecture's prefix."""
        own: dict[str, Any] = {"attention.causal": False, "attention.layer_norm_epsilon": 1e-12}
        return {**own, **({"pooling_type": 4} if self.scores else {})}
