"""The hub's models with sizes and sha256, through huggingface_hub."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from edgeinfer.download.http_source import RemoteFile
from edgeinfer.errors import DownloadError, OfflineError
from edgeinfer.registry.model_file import LATER_PART, PROJECTOR, quant_of

ASK_SECONDS = 20.0
ERROR_NUMBER = re.compile(r"^\[Errno -?\d+\] ")


@dataclass(frozen=True)
class HubModel:
    """A model of a repository: one file, or all its parts in order."""

    quant: str
    files: tuple[RemoteFile, ...]

    @property
    def name(self) -> str:
        """Name of the first file."""
        return self.files[0].name

    @property
    def size_bytes(self) -> int | None:
        """Bytes of all files; None: unknown."""
        sizes = [file.size_bytes for file in self.files]
        return None if None in sizes else sum(size for size in sizes if size is not None)


@dataclass(frozen=True)
class HubAddress:
    """Parsed form of `hf:owner/name[@revision][/file | :quant]` or of the address of a page on the hub."""

    repository: str
    revision: str | None = None
    file: str | None = None
    quant: str = ""


def parse_hub_address(text: str, endpoint: str | None = None) -> HubAddress | None:
    """The repository and the file in a text; None: it isn't an address of the hub.

    Raises:
        DownloadError: it starts like an address of the hub, but is invalid.
    """
    if text.startswith("hf:"):
        return _parse_short(text)
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or url.netloc != urlsplit(endpoint or _endpoint()).netloc:
        return None
    parts = [unquote(part) for part in url.path.strip("/").split("/")]
    if len(parts) >= 5 and parts[2] in ("resolve", "blob"):
        return HubAddress("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
    if len(parts) == 2:
        return HubAddress("/".join(parts))
    return None


def _parse_short(text: str) -> HubAddress:
    owner, _, remainder = text.removeprefix("hf:").removeprefix("//").partition("/")
    name, _, file = remainder.partition("/")
    name, _, quant = name.partition(":")
    name, _, revision = name.partition("@")
    if not owner or not name or (quant and file):
        raise DownloadError(f"{text}: wanted hf:owner/name/file.gguf, hf:owner/name or hf:owner/name:QUANT")
    return HubAddress(f"{owner}/{name}", revision or None, file or None, quant)


def list_hub_models(
    repository: str, revision: str | None = None, endpoint: str | None = None
) -> list[HubModel]:
    """The GGUF models of a repository with their files, at its current commit.

    Token, endpoint and offline mode are those of huggingface_hub's environment and login.

    Raises:
        OfflineError: the hub can't be reached.
        DownloadError: the hub refuses the request.
    """
    from huggingface_hub import HfApi, constants, hf_hub_url
    from huggingface_hub.utils import HfHubHTTPError, build_hf_headers  # type: ignore[attr-defined]

    if constants.HF_HUB_OFFLINE:
        raise OfflineError(f"{repository}: the hub can't be reached: HF_HUB_OFFLINE is set")
    # Among its base classes is the error class of the HTTP client that this release uses.
    failures: tuple[type[Any], ...] = (OSError, ValueError, *HfHubHTTPError.__bases__)
    try:
        info = HfApi(endpoint).model_info(
            repository, revision=revision, files_metadata=True, timeout=ASK_SECONDS
        )
    except Exception as error:
        if not isinstance(error, failures):
            raise
        raise _refusal(repository, error) from error
    headers = {str(name): str(value) for name, value in build_hf_headers(library_name="edgeinfer").items()}
    files = []
    for sibling in info.siblings or []:
        if _is_model(sibling.rfilename):
            url = hf_hub_url(repository, sibling.rfilename, revision=info.sha, endpoint=endpoint)
            files.append(_remote(sibling, url, headers, repository))
    return _grouped(files)


def _is_model(name: str) -> bool:
    """Whether it is a GGUF file of a model with a relative path that stays in its folder."""
    path = PurePosixPath(name)
    inside = not path.is_absolute() and ".." not in path.parts and "\\" not in name
    return inside and name.endswith(".gguf") and not PROJECTOR.match(path.name)


def _remote(sibling: Any, url: str, headers: dict[str, str], repository: str) -> RemoteFile:
    digest = sibling.lfs.sha256 if sibling.lfs else None
    return RemoteFile(
        url,
        sibling.rfilename,
        sibling.size,
        digest,
        "the hub" if digest else "",
        headers,
        f"set HF_TOKEN or run `hf auth login`, and accept the licence at {_page(repository)}",
    )


def _grouped(files: Sequence[RemoteFile]) -> list[HubModel]:
    """Files grouped into models, with the parts of one model together; largest model first."""
    groups: dict[str, list[RemoteFile]] = defaultdict(list)
    for file in files:
        first = LATER_PART.sub("", file.name)
        groups[first if first != file.name else _without_number(file.name)].append(file)
    models = [
        HubModel(quant_of(group[0].name), tuple(sorted(group, key=lambda file: file.name)))
        for group in groups.values()
    ]
    return sorted(models, key=lambda model: -(model.size_bytes or 0))


def _without_number(name: str) -> str:
    head, mark, _ = name.rpartition("-00001-of-")
    return head if mark else name


def _refusal(repository: str, error: Exception) -> DownloadError:
    """The hub's error as one line."""
    kind = type(error).__name__
    page = _page(repository)
    if kind == "GatedRepoError":
        return DownloadError(
            f"{repository}: accept its licence at {page}, then set HF_TOKEN or run `hf auth login`"
        )
    if kind == "RepositoryNotFoundError":
        return DownloadError(
            f"{repository}: the hub has no such repository, or it is private; look at {page}, or set HF_TOKEN"
        )
    if kind == "RevisionNotFoundError":
        return DownloadError(f"{repository}: the hub has no such revision of it")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return DownloadError(f"{repository}: the hub returned status {status}; try again later")
    why = ERROR_NUMBER.sub("", (str(error).splitlines() or [kind])[0])
    return OfflineError(f"{repository}: the hub can't be reached: {why}")


def _page(repository: str) -> str:
    return f"{_endpoint()}/{repository}"


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)
