"""The errors and messages for users, of one line each, and how they quote values."""

import reprlib

LONGEST = 60

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = LONGEST
_SHORT.maxlevel = 2
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 4


class Detail(str):
    """A message of loading about how the model runs, not about a problem: `Model.details` has it, not
    `Model.warnings`.
    """


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


def shown(value: object, longest: int = LONGEST) -> str:
    """`repr` of a value, at most `longest` characters; the middle of a long text is omitted."""
    try:
        text = _SHORT.repr(value)
    except Exception:  # from the value's __repr__, or an integer with more digits than Python prints
        text = f"<{type(value).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def shortened(text: str, longest: int = LONGEST) -> str:
    """A name without line breaks and unprintable characters, at most `longest` characters."""
    line = "".join(letter if letter.isprintable() else "?" for letter in text[: longest + 1])
    return line if len(line) <= longest else f"{line[: longest - 1]}…"
