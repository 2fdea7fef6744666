"""Graphics cards by name, for planning on other machines: `graphics_cards.toml` as `Graphics`."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from edgeinfer_offload.machine.hardware import Graphics, Link

READ_SHARE = 0.9
"""Share of the specified bandwidth that reads reach."""
PROMPT_SHARE = 0.4
"""Share of the specified TFLOP/s that prefill reaches, including dequantization; measured on an H200."""
LINK_SHARE = 0.8
"""Share of the lanes' raw rate that large pinned copies reach."""
PAGEABLE_SHARE = 0.3
"""Share of the pinned rate that copies from pageable memory reach; 9 to 18 of 55 GB/s on an H200."""
LANE_BYTES_PER_SECOND = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}
"""PCI Express generation -> bytes per second of one lane after line coding."""
CONTEXT_BYTES = 400 << 20
"""Bytes that driver and desktop are assumed to use on a described GPU before anything is loaded."""
COMMON_WORDS = frozenset(
    {"nvidia", "geforce", "gpu", "graphics", "generation", "tesla", "edition", "workstation", "server"}
    | {"hbm2", "hbm2e", "hbm3", "hbm3e", "sxm", "sxm4", "sxm5", "desktop", "notebook"}
)
LAPTOP_WORDS = frozenset({"laptop", "mobile", "notebook", "max-q", "maxq"})
FAMILIES = ("rtx", "gtx")
"""Name prefixes that users omit: "4060 laptop" is an RTX 4060 Laptop."""


@dataclass(frozen=True)
class Card:
    """A card's specification."""

    name: str
    gib: float
    gb_s: float
    pcie: int
    lanes: int
    tflop_s: float

    def graphics(self) -> Graphics:
        """The card for the planner, with reachable rates instead of the specified ones."""
        nbytes = int(self.gib * 2**30)
        return Graphics(
            self.name,
            0,
            nbytes,
            nbytes,
            READ_SHARE * self.gb_s * 1e9,
            PROMPT_SHARE * self.tflop_s * 1e12,
            link_of(LINK_SHARE * self.lanes * LANE_BYTES_PER_SECOND[self.pcie]),
            context_bytes=CONTEXT_BYTES,
        )


def link_of(pinned: float) -> Link:
    """A link with the given bytes per second of large pinned copies."""
    return Link(pinned, pinned, PAGEABLE_SHARE * pinned, PAGEABLE_SHARE * pinned)


@cache
def cards() -> tuple[Card, ...]:
    """All known cards; read once, as a plan for several machines looks up each of theirs."""
    text = Path(__file__).with_name("graphics_cards.toml").read_text(encoding="utf-8")
    return tuple(Card(name, **row) for name, row in tomllib.loads(text)["cards"].items())


@cache
def _words_of_cards() -> dict[str, set[str]]:
    """Name of a card -> the words that distinguish it."""
    return {card.name: _words(card.name) for card in cards()}


def find_card(name: str) -> Card | None:
    """The card with this name, from a user or a driver; None: unknown, or several with different memory."""
    cards = matching_cards(name)
    return cards[0] if len(cards) == 1 else None


def matching_cards(name: str) -> list[Card]:
    """The cards with this name; if there is none, those whose name also has the memory size ("A100 40GB")."""
    requested, known = _words(name), _words_of_cards()
    for words in (requested, *({family, *requested} for family in FAMILIES)):
        # A driver also names the memory of an H100, of which the table has only one.
        for names in (words, {word for word in words if not _SIZE.fullmatch(word)}):
            if matches := [card for card in cards() if known[card.name] == names]:
                own = matches[0].gib
                given_sizes = [float(word.removesuffix("gb")) for word in words - names]
                return matches if all(size == own for size in given_sizes) else []
        more = [card for card in cards() if words and words < known[card.name] and _only_size(card, words)]
        if more:
            return more
    return []


_SIZE = re.compile(r"\d+gb")


def _only_size(card: Card, words: set[str]) -> bool:
    return all(_SIZE.fullmatch(word) for word in _words_of_cards()[card.name] - words)


def _words(name: str) -> set[str]:
    """The words that distinguish cards: "NVIDIA GeForce RTX 4060 Laptop GPU" gives "rtx 4060 laptop"."""
    spaced = re.sub(r"[()_/-]", " ", name.lower().replace("max-q", "maxq"))
    spaced = re.sub(r"\b(rtx|gtx)(?=\d)", r"\1 ", spaced)
    spaced = re.sub(r"(\d)(ti|super)\b", r"\1 \2", spaced)
    spaced = re.sub(r"(\d) ?(?:gb|gib|g)\b", r"\1gb", spaced)
    words = {"laptop" if word in LAPTOP_WORDS else word for word in spaced.split()}
    return words - COMMON_WORDS
