"""An open model as the numpy reference runs it, window by window, for measurements on a text."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from edgeinfer.errors import SettingError
from edgeinfer.evaluation.evaluating import text_windows
from edgeinfer.hugging_face.opening import open_folder
from edgeinfer.loading.loading import read_tokenizer
from edgeinfer.model_config.config import ModelConfig
from edgeinfer.model_config.weights import read_config, read_weights, rope_factors
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.reference.backend import ReferenceBackend
from edgeinfer_quant_formats import GGUFFile

WINDOW = 512
"""Tokens of a window, as in llama.cpp's imatrix tool."""


@dataclass(frozen=True)
class ReferenceModel:
    """A decoder's file, and windows of `window` tokens as its input; weights are decoded on use."""

    file: GGUFFile
    config: ModelConfig
    window: int = WINDOW

    @cached_property
    def spec(self) -> DecoderSpec:
        return self.config.specification(rope_factors(self.file, self.config, self.window))

    @cached_property
    def weights(self) -> DecoderWeights:
        return read_weights(self.file, self.config)

    def backend(self) -> ReferenceBackend:
        """A backend with an empty state for one window."""
        state = DecoderState.allocate(self.spec, self.window, "f32")
        return ReferenceBackend(self.spec, self.weights, state)

    def with_file(self, file: GGUFFile) -> "ReferenceModel":
        """The same model with other weights."""
        return replace(self, file=file)

    def windows(self, text: str, tokens: int) -> list[tuple[int, ...]]:
        """Whole windows of the text, at most `tokens` tokens; each begins with BOS if the model uses it.

        Raises:
            SettingError: a text without a whole window.
        """
        chunks = max(tokens // self.window, 1)
        found = text_windows(read_tokenizer(self.file, self.config), text, self.window, chunks)
        return [window.ids for window in found]


def reference_model(file: GGUFFile, window: int = WINDOW) -> ReferenceModel:
    """The model of an open file; windows are shorter if it was trained for less.

    Raises:
        SettingError: an encoder, which `quantize` can't measure.
    """
    config = read_config(file)
    if config.is_encoder:
        raise SettingError(f"{file.origin}: an encoder; a text can be measured with a decoder only")
    return ReferenceModel(file, config, min(window, config.trained_context))


@contextmanager
def opened(path: Path) -> Iterator[GGUFFile]:
    """The open model, a GGUF file or a folder, of which one tensor at a time is in memory."""
    with open_folder(path, in_memory=True) if path.is_dir() else GGUFFile.open(path) as file:
        yield file
