"""Models without a file on this disk, as far as a plan needs them: by shape, or by the hub's header."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from edgeinfer.errors import DownloadError, NotPulledError, SettingError, UnknownModelError
from edgeinfer.registry.entries import USUAL_QUANT, RegistryEntry, read_registry
from edgeinfer.registry.registry import split_quant
from edgeinfer.shapes.headers import shape_header
from edgeinfer.shapes.known_shapes import find_shape
from edgeinfer_quant_formats import GGUFFile
from edgeinfer_quant_formats.errors import FormatError


@dataclass(frozen=True)
class ModelHeader:
    """A model's metadata and tensor table, without weights. `note`: where it is from."""

    name: str
    file: GGUFFile
    note: str = ""


def shape_model(shape: str, quant: str = "") -> ModelHeader:
    """The header of a known shape; `quant` "": Q4_K_M. Raises `SettingError` for an unknown shape or type."""
    found, quant = find_shape(shape), quant or USUAL_QUANT
    try:
        return ModelHeader(f"{found.name}:{quant.upper()}", shape_header(found, quant))
    except FormatError as error:
        raise SettingError(str(error)) from error


@contextmanager
def absent_model(missing: NotPulledError) -> Iterator[ModelHeader]:
    """The header of a registry model that isn't on this disk: from its shape, else from the hub.

    Raises:
        NotPulledError: its shape isn't known, and the hub can't be reached.
        UnknownModelError: the registry has no such quantization, and its shape no such type.
    """
    entries = read_registry()
    name, quant = split_quant(missing.name, entries)
    assert name is not None
    entry = entries[name]
    quant = (entry.quant_named(quant) or quant.upper()) if quant else entry.usual_quant
    if entry.shape:
        yield _of_shape(entry, quant)
        return
    with _on_the_hub(entry, quant, missing) as file:
        yield ModelHeader(entry.name_of(quant), file, "planned from the header of the file on the hub")


def entry_header(entry: RegistryEntry, quant: str) -> GGUFFile | None:
    """The header of an entry's file from its shape, with the entry's context; None: its shape isn't known.

    Raises `FormatError` for an unknown type.
    """
    if not entry.shape:
        return None
    shape = find_shape(entry.shape)
    return shape_header(replace(shape, context=entry.context or shape.context), quant.removeprefix("UD-"))


def _of_shape(entry: RegistryEntry, quant: str) -> ModelHeader:
    try:
        header = entry_header(entry, quant)
    except FormatError as error:
        raise UnknownModelError(f"{entry.name}:{quant}: {error}") from error
    assert header is not None
    note = f"planned from its shape in {quant}: the file is not on this disk yet"
    return ModelHeader(entry.name_of(quant), header, note)


@contextmanager
def _on_the_hub(entry: RegistryEntry, quant: str, missing: NotPulledError) -> Iterator[GGUFFile]:
    from edgeinfer.download.header_sizes import remote_header
    from edgeinfer.download.hub import list_hub_models

    try:
        if entry.repository is None:
            raise DownloadError(f"{entry.name} isn't on the hub")
        models = list_hub_models(entry.repository)
        wanted = [m for m in models if m.quant == quant and entry.quant_of_file(m.name) is not None]
        if not wanted:
            raise DownloadError(f"{entry.repository} has no {quant}")
        header = remote_header(wanted[0].files)
        file = header.__enter__()
    except (DownloadError, FormatError) as error:
        raise NotPulledError(
            f"{missing}; no plan: its shape isn't known, and {error}", missing.name
        ) from error
    try:
        yield file
    finally:
        header.__exit__(None, None, None)
