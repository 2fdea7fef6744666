"""Models split over several files: NAME-00001-of-00003.gguf and so on."""

import re
from pathlib import Path

from edgeinfer_quant_formats.errors import FormatError, printable
from edgeinfer_quant_formats.gguf.file_part import FilePart

PART_NAME = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

COUNT_KEY = "split.count"
NUMBER_KEY = "split.no"
TENSORS_KEY = "split.tensors.count"
SPLIT_KEYS = (COUNT_KEY, NUMBER_KEY, TENSORS_KEY)


def part_path(path: Path, number: int, count: int) -> Path:
    """The path of part `number` (from 1) of a set of `count`, next to `path`, which is a part.

    Raises:
        FormatError: the name of `path` is not that of a part.
    """
    match = PART_NAME.fullmatch(path.name)
    if match is None:
        raise FormatError(
            f"{printable(path)}: {COUNT_KEY} {count}, wanted a file name that ends in "
            f"-{number:05d}-of-{count:05d}.gguf to find the other parts by"
        )
    return path.with_name(f"{match['name']}-{number:05d}-of-{count:05d}.gguf")


def open_parts(path: Path, *, unknown_types: bool = False) -> list[FilePart]:
    """Open the file and, if it is one of several parts, the others; in the order of the set.

    `unknown_types`: as for `read_tensor_table`.

    Raises:
        FormatError: a part that is damaged, missing or of another set, a tensor in two parts.
        OSError: the file can't be opened.
    """
    opened = FilePart(path, unknown_types=unknown_types)
    parts = [opened]
    try:
        count = _split_value(opened, COUNT_KEY, default=1, minimum=1, maximum=99999)
        if count > 1:
            parts = _open_set(opened, count, parts, unknown_types)
    except BaseException:
        for part in parts:
            part.close()
        raise
    return parts


def _open_set(opened: FilePart, count: int, to_close: list[FilePart], unknown_types: bool) -> list[FilePart]:
    number = _split_value(opened, NUMBER_KEY, default=None, minimum=0, maximum=count - 1)
    expected = part_path(opened.path, number + 1, count).name
    if opened.path.name != expected:
        raise FormatError(
            f"{printable(opened.path)}: holds part {number + 1} of {count}, wanted the file name {expected}"
        )
    parts = []
    for index in range(count):
        path = part_path(opened.path, index + 1, count)
        if not path.exists():
            raise FormatError(f"{printable(path)}: missing, wanted all {count} parts of the set")
        part = FilePart(path, part=index, unknown_types=unknown_types)
        to_close.append(part)
        parts.append(part)
        _check_member(part, index, count)
    opened.close()
    _check_tensors(parts)
    return parts


def _check_member(part: FilePart, index: int, count: int) -> None:
    for key, expected in ((COUNT_KEY, count), (NUMBER_KEY, index)):
        seen = _split_value(part, key, default=None, minimum=0, maximum=99999)
        if seen != expected:
            raise FormatError(f"{printable(part.path)}: {key} {seen}, wanted {expected}")


def _check_tensors(parts: list[FilePart]) -> None:
    paths: dict[str, Path] = {}
    for part in parts:
        for name in part.tensors:
            if name in paths:
                raise FormatError(
                    f"{printable(part.path)}: tensor {printable(name)} is in {paths[name].name} too, "
                    "wanted in one part only"
                )
            paths[name] = part.path
    expected = _split_value(parts[0], TENSORS_KEY, default=len(paths), minimum=0, maximum=1 << 31)
    if expected != len(paths):
        raise FormatError(
            f"{printable(parts[0].path)}: the {len(parts)} parts hold {len(paths)} tensors, "
            f"wanted {expected} ({TENSORS_KEY})"
        )


def _split_value(part: FilePart, key: str, default: int | None, minimum: int, maximum: int) -> int:
    value = part.metadata.get(key, default)
    if type(value) is not int or not minimum <= value <= maximum:
        seen = "missing" if value is None else repr(value)
        raise FormatError(f"{printable(part.path)}: {key} {printable(seen)}, wanted {minimum} to {maximum}")
    return value
