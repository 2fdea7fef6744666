"""Machine descriptions as text, for planning on other machines: "rtx 4060 laptop: 8GiB, 256GB/s, pcie
12GB/s".

    description = [NUMBER "x"] [card] [":"] term {"," term}      a known card alone is enough
    term        = SIZE [vram]                       GPU memory
                | RATE [vram]                       GPU bandwidth, as specified
                | pcie RATE | pcie GENERATION [x LANES]
                | NUMBER tflops                     float16 matmul speed of the GPU, as specified
                | nvlink                            the cards are linked by it
                | SIZE ram | RATE ram               main memory, and its bandwidth, as specified
                | NUMBER threads | NUMBER gops      the CPU, and its operations per second in prefill

SIZE is a number with GiB or MiB (GB and MB mean the same here, as memory is sold). RATE is a number with
GB/s, GiB/s or TB/s, in bytes; Gb/s is refused. "ram" may precede or follow its value. Case and order don't
matter otherwise. "cpu" instead of a card means no GPU. With "2x" there are two cards of the kind; terms of a
GPU describe each.
"""

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from edgeinfer_offload.machine.graphics_cards import (
    CONTEXT_BYTES,
    LANE_BYTES_PER_SECOND,
    LINK_SHARE,
    PROMPT_SHARE,
    READ_SHARE,
    cards,
    link_of,
    matching_cards,
)
from edgeinfer_offload.machine.hardware import Graphics, Machine, Processor
from edgeinfer_offload.machine.peer_sums import assumed_sums

MAX_GPUS = 16
RAM_BYTES = 16 << 30
RAM_BYTES_PER_SECOND = 60e9
THREADS = 8
OPERATIONS_PER_SECOND = 1e12
"""Default CPU speed in prefill for a description without `gops`: that of a laptop."""
RAM_SHARE = 0.8
"""Share of the specified main memory bandwidth that reads reach."""
FREE_SHARE = 0.75
"""Share of main memory that is free besides other programs."""
OPERATIONS_PER_BYTE = 100
"""Float16 operations per byte read, the ratio of most cards; used if the description has no tflops."""
EXPECTED = 'wanted a known card, or terms as "8GiB, 256GB/s, pcie 12GB/s, 64GB/s ram, 32GiB ram"'


class DescriptionError(ValueError):
    """An invalid description; the message has the part and what was expected."""


@dataclass(frozen=True)
class _DescribedTerms:
    """Values of the description's terms; None: not given."""

    vram: float | None = None
    vram_rate: float | None = None
    link: float | None = None
    operations: float | None = None
    ram: float = RAM_BYTES
    ram_rate: float = RAM_BYTES_PER_SECOND
    threads: float = THREADS
    cpu_operations: float = OPERATIONS_PER_SECOND
    nvlink: float = 0.0


_NUMBER = r"(\d+(?:\.\d+)?)\s*"
_UNITS = {"g": 2.0**30, "gb": 2.0**30, "gib": 2.0**30, "mib": 2.0**20, "mb": 2.0**20}
_UNITS |= {"g/s": 1e9, "gb/s": 1e9, "gib/s": 2.0**30, "tb/s": 1e12}
_SIZE = _NUMBER + r"(gib|gb|mib|mb|g)"
_RATE = _NUMBER + r"(g/s|gb/s|gib/s|tb/s)"


def _amount(match: re.Match[str]) -> float:
    """Bytes, or bytes per second, of a size or rate match; either group may hold it."""
    number, unit = (part for part in match.groups() if part)
    return float(number) * _UNITS[unit]


_TERMS: tuple[tuple[str, str, Callable[[re.Match[str]], float]], ...] = (
    ("vram", rf"{_SIZE} ?(?:vram)?", _amount),
    ("vram_rate", rf"{_RATE} ?(?:vram)?", _amount),
    ("link", rf"pcie ?{_RATE}", _amount),
    (
        "link",
        r"pcie ?([345])(?:\.0)? ?(?:x ?(16|8|4|2|1))?",
        lambda m: LINK_SHARE * int(m[2] or 16) * LANE_BYTES_PER_SECOND[int(m[1])],
    ),
    ("nvlink", r"nvlink", lambda _: 1.0),
    ("operations", rf"{_NUMBER}tflops?(?:/s)?", lambda m: float(m[1]) * 1e12),
    ("ram", rf"{_SIZE} ?ram|ram {_SIZE}", _amount),
    ("ram_rate", rf"{_RATE} ?ram|ram {_RATE}", _amount),
    ("threads", rf"{_NUMBER}threads?", lambda m: float(m[1])),
    ("cpu_operations", rf"{_NUMBER}gops?(?:/s)?", lambda m: float(m[1]) * 1e9),
)
_OF_A_GPU = ("vram", "vram_rate", "link", "operations", "nvlink")


def describe_machine(text: str) -> Machine:
    """Parse a description and return the machine.

    Raises:
        DescriptionError: an unknown card without memory and bandwidth, an unreadable or duplicate term,
            a GPU term without a GPU, or an empty description.
    """
    line = " ".join(text.split())
    if (several := re.match(r"(\d{1,2}) ?x +", line, re.ASCII | re.IGNORECASE)) is not None:
        return _several(describe_machine(line[several.end() :]), int(several[1]), line)
    name, colon, remainder = line.partition(":")
    if not colon:
        first, _, others = line.partition(",")
        name, remainder = ("", line) if _is_term(first) else (first, others)
    name, size = _with_size(name.strip())
    terms = [part.strip() for part in (size, *remainder.split(",")) if part.strip()]
    if not name and not terms:
        raise DescriptionError(f"{text!r}: {EXPECTED}")
    given = _read(terms, line)
    wrong = [given[field][0] for field in _OF_A_GPU if field in given]
    if name.lower() == "cpu" and wrong:
        raise DescriptionError(f"{wrong[0]!r} in {line!r}: 'cpu' means no GPU; name a card instead")
    described = _DescribedTerms(**{field: value for field, (_, value) in given.items()})
    processor = Processor(
        name="described CPU",
        threads=max(1, int(described.threads)),
        total_bytes=int(described.ram),
        free_bytes=int(FREE_SHARE * described.ram),
        bytes_per_second=RAM_SHARE * described.ram_rate,
        operations_per_second=described.cpu_operations,
    )
    machine = Machine(processor, origin="described")
    if name.lower() == "cpu" or (not name and described.vram is None and described.vram_rate is None):
        return machine
    return _with_graphics(machine, name, described)


def _several(machine: Machine, count: int, line: str) -> Machine:
    """The machine with `count` of its GPU. Raises `DescriptionError`: it has none, or no such number."""
    if not machine.gpus or not 1 <= count <= MAX_GPUS:
        raise DescriptionError(f"{line!r}: wanted 1 to {MAX_GPUS} cards, as '2x rtx 3090'")
    gpus = (replace(machine.gpus[0], index=index) for index in range(count))
    return replace(machine, gpus=tuple(gpus))


def _with_size(name: str) -> tuple[str, str]:
    """A card's name, and the memory size after it if the table has no card with that size ("4060 Ti
    16GB").
    """
    match = re.fullmatch(r"(.*\S)[ ,]+(\d+(?:\.\d+)? ?(?:gib|gb|g))(?: vram)?", name, re.IGNORECASE)
    if match is None or matching_cards(name):
        return name, ""
    return match[1], match[2]


def _with_graphics(machine: Machine, name: str, described: _DescribedTerms) -> Machine:
    cards = matching_cards(name)
    if len(cards) > 1 and described.vram:
        cards = [card for card in cards if card.gib * 2.0**30 == described.vram]
    if len(cards) > 1:
        raise DescriptionError(f"{name!r}: which one? {' or '.join(card.name for card in cards)}")
    if cards:
        graphics = cards[0].graphics()
    elif described.vram and described.vram_rate:
        link = link_of(LINK_SHARE * 16 * LANE_BYTES_PER_SECOND[4])
        graphics = Graphics(name or "described GPU", 0, 0, 0, 0.0, 0.0, link, context_bytes=CONTEXT_BYTES)
    else:
        raise DescriptionError(_missing_terms(name, described))
    if described.vram:
        graphics = replace(graphics, total_bytes=int(described.vram), free_bytes=int(described.vram))
    if described.vram_rate:
        rate = READ_SHARE * described.vram_rate
        assumed = graphics.operations_per_second or OPERATIONS_PER_BYTE * PROMPT_SHARE * described.vram_rate
        graphics = replace(graphics, bytes_per_second=rate, operations_per_second=assumed)
    if described.operations:
        graphics = replace(graphics, operations_per_second=PROMPT_SHARE * described.operations)
    if described.link:
        graphics = replace(graphics, link=link_of(described.link))
    peers = assumed_sums(graphics.name, nvlink=described.nvlink > 0)
    return replace(machine, gpus=(graphics,), peers=peers)


def _missing_terms(name: str, described: _DescribedTerms) -> str:
    """The error text for a missing GPU: an unknown name, or an incomplete specification."""
    if not described.vram and not described.vram_rate:
        return f"{name!r}: no such card in the table; {_nearest(name)}"
    missing = "its bandwidth, as 256GB/s" if described.vram else "its memory, as 8GiB"
    if not name:
        return f"a GPU was described without {missing}"
    return f"{name!r}: no card in the table, and described without {missing}"


def _is_term(text: str) -> bool:
    return any(re.fullmatch(pattern, text.strip().lower()) for _, pattern, _ in _TERMS)


def _read(terms: Iterable[str], whole: str) -> dict[str, tuple[str, float]]:
    """For each given field of `_DescribedTerms`, the term and its value."""
    given: dict[str, tuple[str, float]] = {}
    for term in terms:
        field, value = _read_term(term, whole)
        if field in given:
            raise DescriptionError(f"{term!r} in {whole!r}: saw {given[field][0]!r} before, wanted one")
        given[field] = term, value
    return given


def _read_term(term: str, whole: str) -> tuple[str, float]:
    if re.search(r"\d\s*(?:[GT]i?b/s|[gt]i?bits?/s|[gt]i?bps)", term, re.ASCII):
        raise DescriptionError(f"{term!r} in {whole!r}: saw bits a second, wanted bytes, as 256GB/s")
    for field, pattern, value in _TERMS:
        match = re.fullmatch(pattern, term.lower(), re.ASCII)
        if match:
            numbers = [float(number) for number in match.groups() if number and number[0].isdigit()]
            if numbers and not any(numbers):
                raise DescriptionError(f"{term!r}: saw 0, wanted a positive number")
            return field, value(match)
    raise DescriptionError(f"{term!r} in {whole!r}: {EXPECTED}")


def _nearest(name: str) -> str:
    """The known cards with the most similar names, and how to describe a card without the table."""
    known = {card.name.lower(): card.name for card in cards()}
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.0)
    names = ", ".join(known[match] for match in near)
    return f'known are {names} and others; or describe it, as "{name}: 8GiB, 256GB/s, pcie 12GB/s"'
