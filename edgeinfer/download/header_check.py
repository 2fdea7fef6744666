"""Whether edgeinfer supports a model, and what the model loses, from its header, before the download."""

import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from edgeinfer.errors import DownloadError
from edgeinfer.model_config.support import ModelSupport, header_support, model_support, unsupported_type
from edgeinfer.registry.low_bits import low_bits_note
from edgeinfer_quant_formats import GGUFFile
from edgeinfer_quant_formats.errors import FormatError, UnsupportedTypeError
from edgeinfer_quant_formats.gguf.file_part import FilePart
from edgeinfer_quant_formats.gguf.header_length import declared_bytes
from edgeinfer_quant_formats.gguf.part_names import COUNT_KEY

HeaderCheck = Callable[[bytes, str], bool]
"""Called with the first bytes of a file and its name; returns whether they sufficed. Raises
`DownloadError`.
"""


@dataclass(frozen=True)
class IncomingModel:
    """Whether edgeinfer's engine supports a model, and a line on what it loses with few bits per weight."""

    support: ModelSupport
    note: str | None = None


def incoming_model(head: bytes, name: str) -> IncomingModel | None:
    """What the first bytes of a file say; None: `head` ends within the header, or it is damaged."""
    try:
        size = declared_bytes(head, name)
    except UnsupportedTypeError:
        size = len(head)
    if size is None:
        return None
    with tempfile.TemporaryDirectory(prefix="edgeinfer-") as folder:
        # A sparse file of the full length, so that the readers for files on disk can be used.
        path = Path(folder) / PurePosixPath(name).name
        path.write_bytes(head)
        with path.open("r+b") as file:
            file.truncate(max(size, len(head)))
        try:
            part = FilePart(path)
        except UnsupportedTypeError as error:
            return IncomingModel(unsupported_type(error, path))
        except FormatError:
            return None
        with closing(part):
            if part.metadata.get(COUNT_KEY, 1) != 1:  # a part of a model whose other parts come later
                return IncomingModel(header_support(part.metadata), low_bits_note(part.tensors.values()))
        with GGUFFile.open(path) as model:
            return IncomingModel(model_support(model), low_bits_note(model.tensors.values()))


def check_header(requested: str, say: Callable[[str], None]) -> HeaderCheck:
    """A check that stops the download of an unsupported model, and calls `say` with what the model loses;
    `requested`: the name that the user typed.
    """

    def check(head: bytes, name: str) -> bool:
        model = incoming_model(head, name)
        if model is None:
            return False
        if not model.support.is_native:
            remedy = f"to fetch it for that: edgeinfer pull {requested} --engine llama.cpp"
            raise DownloadError(f"{requested}: {model.support}; {remedy}")
        if model.note:
            say(model.note)
        return True

    return check
