"""Implements `pull`: from a name to complete, verified files on this disk."""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit, urlunsplit

from edgeinfer.download.header_check import check_header
from edgeinfer.download.header_sizes import remote_sizes
from edgeinfer.download.http_source import RemoteFile
from edgeinfer.download.hub import HubAddress, HubModel, list_hub_models, parse_hub_address
from edgeinfer.download.partial_file import partial_path
from edgeinfer.download.quant_selection import QuantOption, select_quant
from edgeinfer.download.transfer import (
    DownloadedFile,
    RetryPolicy,
    TransferCallbacks,
    check_disk_space,
    fetch,
)
from edgeinfer.errors import DownloadError, OfflineError, UnknownModelError
from edgeinfer.options.load_options import LocalEngine
from edgeinfer.planning.fit import known_machine
from edgeinfer.registry.entries import RegistryEntry, read_registry
from edgeinfer.registry.found_models import ExternalFolders
from edgeinfer.registry.model_file import DRAFT_PREFIXES, ModelFile, bits_of, parts_of
from edgeinfer.registry.registry import default_models_folder, find_model, first_few, list_models, split_quant
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_quant_formats import GGUFFile
from edgeinfer_quant_formats.errors import FormatError, UnsupportedTypeError, printable


@dataclass(frozen=True)
class PulledModel:
    """A downloaded model. `files`: all its parts, in order."""

    name: str
    """Name for later commands."""
    files: tuple[DownloadedFile, ...]

    @property
    def path(self) -> Path:
        """Path of the first file."""
        return self.files[0].path


@dataclass(frozen=True)
class Pull:
    """Settings of a pull. `endpoint`: of the hub, None: huggingface_hub's setting."""

    models_folder: Path
    callbacks: TransferCallbacks
    retry_policy: RetryPolicy
    endpoint: str | None = None
    engine: LocalEngine = "edgeinfer"
    """Engine for the model: models that edgeinfer's engine doesn't support are downloaded for llama.cpp
    only.
    """
    others: ExternalFolders | None = None
    """Model folders of other programs; None: the usual ones."""
    machine: Callable[[], Machine] = known_machine
    """The machine for which a quantization is selected, if none is given."""


def pull(requested: str, settings: Pull | None = None) -> PulledModel:
    """Download a model: `NAME[:QUANT]` of the registry, `hf:owner/name[:QUANT | /file.gguf]`, or an address.

    A model on this disk isn't downloaded again, and needs no network.

    Raises:
        UnknownModelError: no such name.
        DownloadError: the download fails, the data isn't the expected one, or the disk is full.
        RegistryError, OSError: the user's models.toml can't be read, or the file can't be written.
    """
    settings = settings or Pull(default_models_folder(), TransferCallbacks(), RetryPolicy())
    _check_address(requested)
    entries = read_registry()
    name, quant = split_quant(requested, entries)
    if name is not None:
        return _pull_entry(entries[name], quant, settings)
    address = parse_hub_address(requested, settings.endpoint)
    if address is not None:
        return _pull_address(requested, address, settings)
    if urlsplit(requested).scheme in ("http", "https"):
        return _pull_url(requested, settings)
    raise UnknownModelError(
        f"{requested[:60]}: not in the model registry; name one of `edgeinfer list --all`, "
        "hf:owner/name/file.gguf, or an address that begins with https://"
    )


def _check_address(requested: str) -> None:
    """Raise `DownloadError` for an invalid address or file name, as `http://[::1` or `a%00.gguf`."""
    try:
        urlsplit(requested).port  # noqa: B018  # reading it checks it
    except ValueError as error:
        raise DownloadError(f"{printable(requested)}: no such address: {error}") from error
    if any(ord(mark) < 32 or ord(mark) == 127 for mark in unquote(requested)):
        raise DownloadError(f"{printable(requested)}: control characters in an address or name, wanted none")


def _pull_entry(entry: RegistryEntry, quant: str, settings: Pull) -> PulledModel:
    if entry.repository is None and entry.url is None:
        raise UnknownModelError(
            f"{entry.name}: is built in or a local file ({entry.file}); nothing to download"
        )
    here = _local_model(entry, quant, settings)
    if here:
        return PulledModel(here.name, tuple(_existing_file(path) for path in parts_of(here.path)))
    if entry.repository is None:
        selected = entry.quant_named(quant) if quant else entry.quants[0]
        if selected is None:
            raise _unknown_quant_error(entry.name, quant, entry.quants)
        remote = RemoteFile(entry.url_of(selected) or "", entry.file_of(selected))
        return _fetched(entry.name_of(selected), [_with_digest(remote, entry, selected)], Path(), settings)
    there = _hub_models(entry.repository, None, settings)
    models = [model for model in there if entry.quant_of_file(model.name) is not None]
    model = _selected(entry.name, models, quant, settings.models_folder / entry.repository, settings)
    files = [
        _with_digest(file, entry, model.quant) if len(model.files) == 1 else file for file in model.files
    ]
    return _fetched(entry.name_of(model.quant), files, Path(entry.repository), settings)


def _local_model(entry: RegistryEntry, quant: str, settings: Pull) -> ModelFile | None:
    """The complete model if it is on this disk, from any program."""
    requested = f"{entry.name}:{quant}" if quant else entry.name
    try:
        model_file = find_model(requested, models_folder=settings.models_folder, others=settings.others)
    except UnknownModelError:
        return None
    return model_file if _is_whole(model_file.path) else None


def _is_whole(path: Path) -> bool:
    """Whether all parts exist, and no download is in progress."""
    try:
        with GGUFFile.open(path) as file:
            return not any(partial_path(part).exists() for part in file.parts)
    except (FormatError, OSError):
        return False


def _with_digest(remote: RemoteFile, entry: RegistryEntry, quant: str) -> RemoteFile:
    """The file with its size and sha256 from the registry.

    Raises `DownloadError` if the hub's values differ.
    """
    size, digest = entry.size_bytes.get(quant), entry.sha256.get(quant)
    for fact, ours, theirs in (("sha256", digest, remote.sha256), ("bytes", size, remote.size_bytes)):
        if ours is not None and theirs is not None and ours != theirs:
            raise DownloadError(
                f"{entry.name}:{quant}: the model registry has {fact} {ours}, the hub has {theirs} now: "
                "the file was replaced; to download the new one: "
                f"edgeinfer pull hf:{entry.repository}/{remote.name}"
            )
    if digest:
        remote = replace(remote, sha256=digest, digest_source="models.toml")
    return replace(remote, size_bytes=remote.size_bytes or size)


def _pull_address(requested: str, address: HubAddress, settings: Pull) -> PulledModel:
    repository = Path(address.repository)
    if address.file is not None:
        path = settings.models_folder / repository / address.file
        if path.exists() and _is_whole(path):
            return PulledModel(path.stem, tuple(_existing_file(part) for part in parts_of(path)))
    models = _hub_models(address.repository, address.revision, settings)
    if address.file is None:
        whole = [each for each in models if not Path(each.name).name.startswith(DRAFT_PREFIXES)] or models
        model = _selected(requested, whole, address.quant, settings.models_folder / repository, settings)
    else:
        having = [model for model in models if address.file in [file.name for file in model.files]]
        if not having:
            raise DownloadError(
                f"{address.repository}: {address.file} isn't there; {_available_models(models)}"
            )
        model = having[0]
    return _fetched(Path(model.name).stem, model.files, repository, settings, requested)


def _pull_url(url: str, settings: Pull) -> PulledModel:
    """Download a file from any address into a folder with the host's name. A user and password in the address
    are sent to that host only and never shown.
    """
    parts = urlsplit(url)
    login, _, host = parts.netloc.rpartition("@")
    plain = urlunsplit(parts._replace(netloc=host))
    name = PurePosixPath(unquote(parts.path)).name
    if not name.endswith(".gguf"):
        raise DownloadError(f"{plain}: wanted an address that ends in .gguf")
    headers = {}
    if login:
        headers["Authorization"] = f"Basic {base64.b64encode(unquote(login).encode()).decode()}"
    wrong = "the user or password in the address is wrong" if login else ""
    remote = RemoteFile(plain, name, headers=headers, login=wrong)
    return _fetched(Path(name).stem, [remote], Path(parts.hostname or ""), settings, plain)


def _hub_models(repository: str, revision: str | None, settings: Pull) -> list[HubModel]:
    try:
        models = list_hub_models(repository, revision, settings.endpoint)
    except OfflineError as error:
        here = [
            model.name for model in list_models(models_folder=settings.models_folder, others=settings.others)
        ]
        raise OfflineError(f"{error}; on this disk: {first_few(here)}") from error
    if not models:
        raise DownloadError(
            f"{repository}: there is no .gguf file in it; look for a repository of GGUF files"
        )
    return models


def _selected(name: str, models: Sequence[HubModel], quant: str, root: Path, settings: Pull) -> HubModel:
    """The model with the given quantization; else one that is in `root`, partially or completely; else the
    best one for the machine.
    """
    by_quant: dict[str, HubModel] = {}
    for model in models:
        by_quant.setdefault(model.quant, model)
    if quant:
        match = next((label for label in by_quant if label.lower() == quant.lower()), None)
        if match is None:
            raise _unknown_quant_error(name, quant, list(by_quant))
        return by_quant[match]
    begun = max(models, key=lambda model: _received_bytes_of(model, root), default=None)
    if begun is not None and (came := _received_bytes_of(begun, root)):
        settings.callbacks.say(f"{begun.quant}: {came / 2**20:.0f} MiB of it are downloaded already")
        return begun
    plain = {label: model for label, model in by_quant.items() if not label.startswith("UD-")} or by_quant
    options = [
        QuantOption(label, model.size_bytes or 0, partial(remote_sizes, model.files, settings.retry_policy))
        for label, model in plain.items()
    ]
    if not options:
        raise DownloadError(f"{name}: none of its files is in the repository any more; name one with hf:")
    selection = select_quant(name, options, settings.machine())
    settings.callbacks.say(selection.why)
    return by_quant[selection.quant]


def _unknown_quant_error(name: str, quant: str, there: Sequence[str]) -> DownloadError:
    names = ", ".join(sorted(there, key=bits_of))
    return DownloadError(f"{name}: there is no {quant}; there are {names}")


def _available_models(models: Sequence[HubModel]) -> str:
    return f"there are {first_few([model.name for model in models])}"


def _fetched(
    name: str, files: Sequence[RemoteFile], folder: Path, settings: Pull, requested: str | None = None
) -> PulledModel:
    """Download all files of a model after a check of the disk space. `requested`: what the user typed, if not
    `name`.
    """
    requested = requested or name
    root = settings.models_folder / folder
    destinations = [root / file.name for file in files]
    missing = sum(
        (file.size_bytes or 0) - _received_bytes(destination)
        for file, destination in zip(files, destinations, strict=True)
    )
    check_disk_space(root, missing)
    downloaded = []
    for index, (file, destination) in enumerate(zip(files, destinations, strict=True), 1):
        if len(files) > 1:
            settings.callbacks.say(f"part {index} of {len(files)}: {file.name}")
        is_checked = index == 1 and settings.engine == "edgeinfer"
        check = check_header(requested, settings.callbacks.say) if is_checked else None
        downloaded.append(fetch(file, destination, settings.callbacks, settings.retry_policy, check))
    _check_model(downloaded)
    return PulledModel(name, tuple(downloaded))


def _received_bytes_of(model: HubModel, root: Path) -> int:
    return sum(_received_bytes(root / file.name) for file in model.files)


def _received_bytes(destination: Path) -> int:
    """Bytes of a file on this disk, partial or complete."""
    return next(
        (path.stat().st_size for path in (destination, partial_path(destination)) if path.exists()), 0
    )


def _check_model(files: Sequence[DownloadedFile]) -> None:
    """Check the structure of files without a known sha256: every tensor must be within the file."""
    try:
        GGUFFile.open(files[0].path).close()
    except UnsupportedTypeError:
        return  # valid, and downloaded for llama.cpp
    except FormatError as error:
        if all(file.digest_source for file in files):
            raise DownloadError(f"{error}; downloaded as published, but edgeinfer can't read it") from error
        for file in files:
            file.path.unlink(missing_ok=True)
        raise DownloadError(f"{error}; damaged in transfer, or on the server: deleted") from error


def _existing_file(path: Path) -> DownloadedFile:
    return DownloadedFile(path, None, existed=True)
