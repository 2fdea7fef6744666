"""Downloads a file completely: resumes partial downloads and verifies the result."""

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from edgeinfer.download.header_check import HeaderCheck
from edgeinfer.download.http_source import (
    BROKEN,
    MAX_PER_REQUEST,
    HttpResponse,
    RangeNotSatisfiableError,
    RemoteFile,
    TemporaryFailureError,
    describe,
    request,
)
from edgeinfer.download.partial_file import CHUNK, PartialFile, Version, held
from edgeinfer.errors import DownloadError
from edgeinfer_quant_formats.errors import UnsupportedTypeError
from edgeinfer_quant_formats.gguf.header_length import declared_bytes

MAGIC = b"GGUF"
FIRST_READ_BYTES = 64 << 10
MAX_HEADER_BYTES = 256 << 20
"""Maximum bytes of metadata and tensor table of a file of unknown length."""
SPARE_BYTES = 64 << 20
"""Bytes of disk space that a download leaves free."""

Progress = Callable[[int, int | None], None]
"""Called with the bytes received and the total (None: unknown)."""


@dataclass(frozen=True)
class RetryPolicy:
    """Retry policy. The transfer fails after `attempts` consecutive attempts without data."""

    attempts: int = 6
    first_wait: float = 1.0
    longest_wait: float = 60.0
    stall_seconds: float = 30.0
    """Seconds without data after which a connection counts as broken."""
    poll_seconds: float = 0.5
    """Seconds between checks whether another program has finished."""
    sleep: Callable[[float], None] = time.sleep

    def seconds(self, failures: int, retry_after: float | None) -> float:
        """Seconds to wait after `failures` consecutive failures: doubled each time, or as the server
        requests.
        """
        usual = self.first_wait * 2 ** (failures - 1)
        return min(usual if retry_after is None else retry_after, self.longest_wait)


@dataclass(frozen=True)
class DownloadedFile:
    """A complete file. `digest_source` "": its expected sha256 is unknown."""

    path: Path
    sha256: str | None
    """None: the file already existed and wasn't read again."""
    digest_source: str = ""
    existed: bool = False


@dataclass(frozen=True)
class TransferCallbacks:
    """Callbacks for the progress of a transfer."""

    progress: Progress = lambda done, total: None
    checking: Callable[[int, int], None] = lambda done, total: None
    """Called while data of earlier runs is hashed."""
    say: Callable[[str], None] = lambda line: None


def fetch(
    remote: RemoteFile,
    destination: Path,
    callbacks: TransferCallbacks | None = None,
    retry_policy: RetryPolicy | None = None,
    check: HeaderCheck | None = None,
) -> DownloadedFile:
    """Download a file to `destination`; partial data of an earlier run is continued.

    `check`: called with the file's first bytes as soon as they are received; it may refuse the file.

    Raises:
        DownloadError: it can't be downloaded, isn't the expected file, or the disk is full. Partial data is
            kept for the next run, unless it is proved wrong.
        OSError: it can't be written.
    """
    callbacks, retry_policy = callbacks or TransferCallbacks(), retry_policy or RetryPolicy()
    waits = 0

    def wait() -> None:
        nonlocal waits
        if waits == 0:
            callbacks.say(f"another program is fetching {remote.name}; waiting for it")
        waits += 1
        retry_policy.sleep(retry_policy.poll_seconds)

    with held(destination, wait) as partial:
        if partial is None:
            return DownloadedFile(destination, None, existed=True)
        try:
            return _Transfer(remote, partial, destination, callbacks, retry_policy, check).run()
        finally:
            if partial.size == 0:
                partial.remove()  # keep no empty partial file


class _Transfer:
    """The transfer of one file."""

    def __init__(
        self,
        remote: RemoteFile,
        partial: PartialFile,
        destination: Path,
        callbacks: TransferCallbacks,
        retry_policy: RetryPolicy,
        check: HeaderCheck | None,
    ) -> None:
        self._remote, self._partial, self._destination = remote, partial, destination
        self._callbacks, self._retry_policy = callbacks, retry_policy
        self._known = Version(None, remote.size_bytes, remote.sha256)
        self._digest_source = remote.digest_source
        self._failures = 0
        self._shorter = 0
        """Number of responses with fewer total bytes than were received."""
        self._declared: int | None = None
        """Bytes of the file by its own header, if the server gives no length; None: not read yet."""
        self._next_check_token = self._next_check = FIRST_READ_BYTES
        self._check = check
        self._kind_known = not remote.name.lower().endswith(".gguf")

    def run(self) -> DownloadedFile:
        partial = self._partial
        if not self._known.follows(partial.version) or self._is_too_long():
            partial.empty()
        if partial.size:
            version = partial.version
            self._known = replace(self._known, tag=version.tag, total=self._known.total or version.total)
        while not self._is_whole():
            before = partial.size
            try:
                self._send_request()
            except TemporaryFailureError as failure:
                self._failures = 0 if partial.size > before else self._failures + 1
                if self._failures >= self._retry_policy.attempts:
                    raise DownloadError(self._failure_message(str(failure))) from failure
                self._wait(str(failure), failure.after)
        return self._checked()

    def _wait(self, why: str, retry_after: float | None) -> None:
        """Wait before the next request; the reason is reported if the last request brought no data."""
        seconds = self._retry_policy.seconds(max(self._failures, 1), retry_after)
        if self._failures:
            self._callbacks.say(f"{why}; again in {seconds:.0f} s")
        self._retry_policy.sleep(seconds)

    def _is_whole(self) -> bool:
        return self._known.total is not None and self._partial.size == self._known.total

    def _is_too_long(self) -> bool:
        return self._known.total is not None and self._partial.size > self._known.total

    def _send_request(self) -> None:
        """Send one request and read its response until it ends or fails."""
        try:
            response = request(
                self._remote, self._partial.size, self._known.tag, self._retry_policy.stall_seconds
            )
        except RangeNotSatisfiableError as nothing:
            if self._partial.size == 0:
                raise DownloadError(f"{self._remote.url}: an empty file, wanted a model") from nothing
            self._shorter += 1
            if self._shorter >= self._retry_policy.attempts:
                raise DownloadError(
                    f"{self._remote.url}: the server announced {self._known.total} bytes, and sends no more "
                    f"than {self._partial.size}"
                ) from nothing
            self._partial.empty()  # the file has become shorter: start again
            self._known = replace(self._known, tag=None)
            raise TemporaryFailureError(str(nothing)) from nothing
        with response.body:
            self._check_version(response)
            self._read(response)

    def _check_version(self, response: HttpResponse) -> None:
        """Compare the server's values with the known ones, before any data is kept."""
        partial, known = self._partial, self._known
        sha256, digest_source = response.digest or (None, "")
        if known.sha256 and sha256 and known.sha256 != sha256:
            raise DownloadError(
                f"{self._remote.url}: its {digest_source} says sha256 {sha256}, {self._digest_source} says "
                f"{known.sha256}: the server has another version now"
            )
        if response.total == 0:
            raise DownloadError(f"{self._remote.url}: an empty file, wanted a model")
        if None not in (known.total, response.total) and known.total != response.total:
            if self._remote.size_bytes is not None:
                raise DownloadError(
                    f"{self._remote.url}: the server offers {response.total} bytes, wanted {known.total}"
                )
            partial.empty()
            self._known = Version(None, None, known.sha256)
            raise TemporaryFailureError("the file on the server has changed")
        if (
            response.first
            and not known.sha256
            and None not in (known.tag, response.tag)
            and known.tag != response.tag
        ):
            partial.empty()
            self._known = Version(None, None, None)
            raise TemporaryFailureError("the file on the server has changed")
        if response.first != partial.size:
            partial.empty()  # no range support, or another version
        if known.sha256 is None and sha256:
            self._digest_source = digest_source
        self._known = Version(response.tag, known.total or response.total, known.sha256 or sha256)
        partial.begin(self._known)
        check_disk_space(partial.path.parent, (self._known.total or 0) - partial.size)

    def _read(self, response: HttpResponse) -> None:
        partial, total = self._partial, self._known.total
        self._callbacks.progress(partial.size, total)
        while data := self._next_bytes(response):
            self._write(data)
            if self._is_too_long():
                partial.remove()
                raise DownloadError(
                    f"{self._remote.url}: more than the {total} announced bytes were received"
                )
            self._check_kind()
            self._check_header()
            if total is None:
                self._check_declared()
            self._callbacks.progress(partial.size, total)
        if total is None:
            self._known = replace(self._known, total=partial.size)
            self._check_kind()
        elif partial.size < total and partial.size - response.first < MAX_PER_REQUEST:
            raise TemporaryFailureError("cut off")

    @staticmethod
    def _next_bytes(response: HttpResponse) -> bytes:
        """The next bytes; empty at the end."""
        try:
            return response.body.read1(CHUNK)
        except BROKEN as error:
            raise TemporaryFailureError(describe(error)) from error

    def _write(self, data: bytes) -> None:
        try:
            self._partial.add(data)
        except OSError as error:
            raise DownloadError(
                f"{self._partial.path.parent}: {error.strerror}; partial data is kept: free some space, "
                "and pull again"
            ) from error

    def _check_kind(self) -> None:
        """Check the file type, so that a login page with status 200 isn't downloaded completely."""
        partial = self._partial
        if self._kind_known or (partial.size < len(MAGIC) and not self._is_whole()):
            return
        self._kind_known = partial.start(len(MAGIC)) == MAGIC
        if not self._kind_known:
            partial.remove()
            raise DownloadError(f"{self._remote.url}: the received data is no GGUF file")

    def _check_declared(self) -> None:
        """Stop a response without a length at the file's length in its own header."""
        partial = self._partial
        if not self._remote.name.lower().endswith(".gguf"):
            return
        if self._declared is None and partial.size >= self._next_check_token:
            self._next_check_token = 2 * partial.size
            with suppress(UnsupportedTypeError):
                self._declared = declared_bytes(self._head(), self._remote.name)
        limit = MAX_HEADER_BYTES if self._declared is None else self._declared
        if partial.size <= limit:
            return
        partial.remove()
        if self._declared is None:
            raise DownloadError(
                f"{self._remote.url}: no whole GGUF header in the first {MAX_HEADER_BYTES >> 20} MiB of an "
                "response without a length; deleted"
            )
        raise DownloadError(
            f"{self._remote.url}: received more than the {self._declared} bytes that the file's own header "
            "declares; deleted, because the server does not send this file alone"
        )

    def _check_header(self) -> None:
        """Pass the first bytes to the caller's check, until they suffice."""
        partial = self._partial
        if self._check is None or (partial.size < self._next_check and not self._is_whole()):
            return
        self._next_check = 2 * partial.size
        try:
            if self._check(self._head(), self._remote.name) or partial.size > MAX_HEADER_BYTES:
                self._check = None
        except DownloadError:
            partial.remove()
            raise

    def _head(self) -> bytes:
        return self._partial.start(min(self._partial.size, MAX_HEADER_BYTES))

    def _checked(self) -> DownloadedFile:
        partial, expected = self._partial, self._known.sha256
        seen = partial.sha256(self._callbacks.checking)
        if expected is not None and seen != expected:
            partial.remove()
            raise DownloadError(
                f"{self._remote.name}: the received file has sha256 {seen}, wanted {expected} "
                f"({self._digest_source}): "
                "damaged in transfer, or another file; deleted, pull it again"
            )
        partial.finish(self._destination)
        return DownloadedFile(self._destination, seen, self._digest_source if expected else "")

    def _failure_message(self, why: str) -> str:
        done, total = self._partial.size, self._known.total
        came = f"{done} of {total} bytes are received" if total else f"{done} bytes are received"
        return f"{self._remote.name}: given up after {self._failures} attempts without data: {why}; {came}"


def check_disk_space(folder: Path, required_bytes: int) -> None:
    """Raise `DownloadError` unless the disk of a folder, which need not exist yet, has `required_bytes`
    free.
    """
    existing = next(candidate for candidate in (folder, *folder.parents) if candidate.exists())
    free = shutil.disk_usage(existing).free
    missing = required_bytes + SPARE_BYTES - free
    if required_bytes > 0 and missing > 0:
        raise DownloadError(
            f"{folder}: {_shown(required_bytes)} still to download, {_shown(free)} free on that disk, wanted "
            f"{_shown(SPARE_BYTES)} more than the download; free {_shown(missing)}"
        )


def _shown(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.1f} MiB"


def read_start(remote: RemoteFile, count: int, retry_policy: RetryPolicy | None = None) -> bytes:
    """The first `count` bytes of a file, or all of a shorter one; nothing is written to disk.

    Raises:
        DownloadError: they can't be downloaded.
    """
    retry_policy = retry_policy or RetryPolicy()
    for failures in range(1, retry_policy.attempts + 1):
        try:
            with request(remote, 0, None, retry_policy.stall_seconds).body as body:
                return body.read(count)
        except RangeNotSatisfiableError as nothing:
            raise DownloadError(f"{remote.url}: an empty file, wanted a model") from nothing
        except (TemporaryFailureError, *BROKEN) as failure:
            why, after = (str(failure), getattr(failure, "after", None))
            if failures == retry_policy.attempts:
                raise DownloadError(f"{remote.name}: given up after {failures} attempts: {why}") from failure
            retry_policy.sleep(retry_policy.seconds(failures, after))
    raise AssertionError("retry_policy has at least one attempt")
