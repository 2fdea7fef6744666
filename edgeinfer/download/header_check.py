"""Checks from its header whether edgeinfer supports a model, before its weights are downloaded."""

import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path, PurePosixPath

from edgeinfer.errors import DownloadError
from edgeinfer.model_config.support import ModelSupport, header_support, model_support, unsupported_type
from edgeinfer_quant_formats import GGUFFile
from edgeinfer_quant_formats.errors import FormatError, UnsupportedTypeError
from edgeinfer_quant_formats.gguf.file_part import FilePart
from edgeinfer_quant_formats.gguf.header_length import declared_bytes
from edgeinfer_quant_formats.gguf.part_names import COUNT_KEY

HeaderCheck = Callable[[bytes, str], bool]
"""Called with the first bytes of a file and its name; returns whether they sufficed. Raises
`DownloadError`.
"""


def incoming_support(head: bytes, name: str) -> ModelSupport | None:
    """Whether edgeinfer's engine supports the model; None: `head` ends within the header, or it is
    damaged.
    """
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
            return unsupported_type(error, path)
        except FormatError:
            return None
        with closing(part):
            if part.metadata.get(COUNT_KEY, 1) != 1:  # a part of a model whose other parts come later
                return header_support(part.metadata)
        with GGUFFile.open(path) as model:
            return model_support(model)


def refuse_unsupported(requested: str) -> HeaderCheck:
    """A check that stops the download of an unsupported model; `requested`: the name that the user typed."""

    def check(head: bytes, name: str) -> bool:
        support = incoming_support(head, name)
        if support is None:
            return False
        if support.is_native:
            return True
        remedy = f"to fetch it for that: edgeinfer pull {requested} --engine llama.cpp"
        raise DownloadError(f"{requested}: {support}; {remedy}")

    return check
