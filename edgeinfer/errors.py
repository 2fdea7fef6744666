"""The error classes for users: one line that states the value given and the value expected."""


class EdgeInferError(Exception):
    """Base of all errors that edgeinfer raises; its text is one line for users."""


class UnknownModelError(EdgeInferError):
    """The name is neither in the model registry nor a GGUF file on this disk."""


class NotPulledError(UnknownModelError):
    """The name is in the model registry, but its files are not on this disk. `name`: argument of `pull`."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class RegistryError(EdgeInferError):
    """An invalid entry of models.toml or of the user's models.toml."""


class DownloadError(EdgeInferError):
    """A file can't be downloaded, or its contents aren't the expected ones."""


class OfflineError(DownloadError):
    """The hub can't be reached, or offline mode is on."""


class UnsupportedModelError(EdgeInferError):
    """The file is valid but has an architecture, tokenizer or tensor that edgeinfer doesn't support."""


class KernelError(EdgeInferError):
    """The kernels can't be built on this machine, or its processor can't run them."""


class ContextOverflowError(EdgeInferError):
    """The prompt is longer than the context window."""


class OutOfMemoryError(EdgeInferError):
    """The model doesn't fit the memory budget."""


class ChatTemplateError(EdgeInferError):
    """The model's chat template failed to compile or to render."""


class SettingError(EdgeInferError):
    """A setting is out of its range."""


class LogitsError(EdgeInferError):
    """The model's logits can't be sampled from: NaN, or no token left."""


class ModelFileError(EdgeInferError):
    """Another program truncated the file of a loaded model; the model must be loaded again."""


class DeviceError(EdgeInferError):
    """The GPU failed during generation."""
