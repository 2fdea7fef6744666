"""Small files of Gemma 4 assistants with seeded random weights, in the layout of llama.cpp's converter."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.model_config.layers.assistant_head import read_assistant_head
from edgeinfer.model_config.weights import ASSISTANT, read_config, read_weights, rope_factors
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.reference import ReferenceBackend
from edgeinfer_quant_formats import GGUFFile
from tests.random_gemma import gemma4_parts
from tests.random_models import RandomModel

CONTEXT = 64


@dataclass(frozen=True)
class RandomAssistant(RandomModel):
    """Narrow layers of Gemma 4 without keys and values, for a target of `target_width`."""

    target_width: int = 64

    def metadata(self) -> dict[str, Any]:
        found = {
            name.replace("gemma4.", f"{ASSISTANT}."): value for name, value in super().metadata().items()
        }
        return {
            **found,
            "general.architecture": ASSISTANT,
            f"{ASSISTANT}.embedding_length_out": self.target_width,
            f"{ASSISTANT}.nextn_predict_layers": self.layers,
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        return {
            **super().tensors(),
            "nextn.pre_projection.weight": (self.width, 2 * self.target_width),
            "nextn.post_projection.weight": (self.target_width, self.width),
        }


def random_assistant(pattern: str = "wwg", **settings: Any) -> RandomAssistant:
    """One for the Gemma 4 models of the zoo; its layers by letter, as those of `gemma4_layers`."""
    sizes = {"width": 32, "head_dim": 32, "tied": True, **settings}
    parts = gemma4_parts(pattern, shared_kv=len(pattern))
    return RandomAssistant("gemma4", layers=len(pattern), **parts, **sizes)


def assistant_logits(
    target_path: Path, path: Path, ids: Sequence[int], drafted: Sequence[int]
) -> npt.NDArray[np.float64]:
    """The formula's logits of an assistant after a text, whose last token the target hasn't processed, and
    after each of some drafted tokens.
    """
    files = GGUFFile.open(target_path), GGUFFile.open(path)
    config = read_config(files[0])
    weights, factors = read_weights(files[0], config), rope_factors(files[0], config, CONTEXT)
    spec = config.specification(factors)
    target = ReferenceBackend(spec, weights, DecoderState.allocate(spec, CONTEXT, "f32"), np.float64)
    x = target.embed(ids[:-1])
    target.forward(x, 0)
    head = read_assistant_head(files[1], config, weights, CONTEXT)
    caches = {own: target.state.blocks[source] for own, source in head.target_caches.items()}
    backend = ReferenceBackend(head.spec, head.weights, DecoderState(caches), np.float64)
    backend.set_hidden(np.concatenate([target.embed([ids[-1]]), target.final_norm(x[-1:])], axis=1), 0)
    found = list[npt.NDArray[np.float32]]()
    for token in (ids[-1], *drafted):
        row = backend.embed([token])
        backend.forward(row, len(ids) - 2)
        found.append(backend.logits(row)[0])
        if len(found) <= len(drafted):
            backend.set_hidden(target.embed([drafted[len(found) - 1]]), 0)
            backend.set_own_hidden(row, 0)
    return np.stack(found).astype(np.float64)
