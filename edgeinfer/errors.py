"""Every mistake that a user can make or meet, as one line that says what was seen and what was wanted."""


class EdgeInferError(Exception):
    """Base of all errors that edgeinfer raises on purpose; its text is one line fit for a person."""


class UnknownModelError(EdgeInferError):
    """The name is neither in the catalogue nor a GGUF file on this disk."""


class NotPulledError(UnknownModelError):
    """The name is in the catalogue, and its files are not on this disk yet. `name`: what to pull."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class RegistryError(EdgeInferError):
    """An entry of models.toml, or of the user's own, that can't be read."""


class DownloadError(EdgeInferError):
    """A file can't be fetched, or isn't what was promised."""


class OfflineError(DownloadError):
    """The hub can't be reached, or was switched off."""


class UnsupportedModelError(EdgeInferError):
    """The file is sound but holds an architecture, tokenizer or tensor that edgeinfer doesn't run."""


class KernelError(EdgeInferError):
    """The kernels can't be built on this machine, or its processor can't run them."""


class ContextOverflowError(EdgeInferError):
    """The prompt is longer than the context window."""


class OutOfMemoryError(EdgeInferError):
    """The model doesn't fit the memory budget."""


class ChatTemplateError(EdgeInferError):
    """The model's chat template failed to compile or to render."""


class SettingError(EdgeInferError):
    """A setting lies outside the range that it is defined for."""


class LogitsError(EdgeInferError):
    """The model's logits can't be sampled from: a NaN among them, or no token left."""


class ModelFileError(EdgeInferError):
    """The file of a loaded model was cut by another program; it has to be loaded again."""


class DeviceError(EdgeInferError):
    """The GPU failed in the middle of an answer."""
