"""Random models in NVFP4 whose matrices have factors."""

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from edgeinfer.model_config.weights import SCALED
from edgeinfer_quant_formats import GGUFFile, GGUFWriter
from tests.random_models import RandomModel


@dataclass(frozen=True)
class ScaledModel(RandomModel):
    """A factor for each matrix; of a model with experts, for each expert alone, whose routing stays."""

    def write(self, path: Path) -> Path:
        """The model's file; next to it is `plain.gguf`, the same without factors."""
        random, plain_path = np.random.default_rng(3), super().write(path.with_name("plain.gguf"))
        with GGUFFile.open(plain_path) as plain, GGUFWriter(path, plain.metadata) as writer:
            for tensor, info in plain.tensors.items():
                writer.add_tensor(tensor, plain.raw(tensor), info.format, info.shape)
                if SCALED.fullmatch(tensor) and (not self.experts or "_exps." in tensor):
                    count, base = info.shape[0] if len(info.shape) == 3 else 1, tensor.removesuffix("weight")
                    factors = random.uniform(0.5, 2, count).astype(np.float32)
                    writer.add_tensor(f"{base}scale", factors, "F32")
                    writer.add_tensor(f"{base}input_scale", factors, "F32")
        return path


def scaled(model: RandomModel) -> ScaledModel:
    """The model in NVFP4 with factors."""
    return ScaledModel(
        **{field.name: getattr(model, field.name) for field in fields(model)} | {"formats": ("NVFP4",)}
    )
