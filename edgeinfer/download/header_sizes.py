"""A model's sizes before the download, from its files' first bytes with metadata and tensor table."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from edgeinfer.download.http_source import RemoteFile
from edgeinfer.download.transfer import RetryPolicy, read_start
from edgeinfer.errors import DownloadError
from edgeinfer.planning.model_plan import sizes_of
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_kernels.system.private_folder import scratch_folder
from edgeinfer_quant_formats import GGUFFile
from edgeinfer_quant_formats.errors import FormatError

READ_BYTES = (8 << 20, 32 << 20)
"""Bytes to request; the larger size for headers with a large vocabulary."""


def remote_sizes(files: Sequence[RemoteFile], retry_policy: RetryPolicy | None = None) -> ModelSizes:
    """The sizes of a model whose files (all parts, in order) are on a server.

    Raises:
        FormatError, UnsupportedModelError: a model that can't be planned.
        DownloadError: its first bytes can't be downloaded.
    """
    with remote_header(files, retry_policy) as file:
        return sizes_of(file)


@contextmanager
def remote_header(files: Sequence[RemoteFile], retry_policy: RetryPolicy | None = None) -> Iterator[GGUFFile]:
    """A model whose files (all parts, in order) are on a server, of which only the header is there.

    The heads are written into sparse files of the full length, so that the readers for files on disk can be
    used.

    Raises:
        FormatError: a damaged header.
        DownloadError: its first bytes can't be downloaded.
    """
    for count in READ_BYTES:
        with scratch_folder() as folder:
            for file in files:
                if file.size_bytes is None:
                    raise DownloadError(f"{file.name}: the server gives no length")
                with (folder / Path(file.name).name).open("wb") as sparse:
                    sparse.write(read_start(file, min(count, file.size_bytes), retry_policy))
                    sparse.truncate(file.size_bytes)
            try:
                model = GGUFFile.open(folder / Path(files[0].name).name)
            except FormatError:
                if count == READ_BYTES[-1] or all((file.size_bytes or 0) <= count for file in files):
                    raise
                continue
            with model:
                yield model
            return
