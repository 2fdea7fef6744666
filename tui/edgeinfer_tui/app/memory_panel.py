"""The memory panel: for each device a bar and its bytes by kind."""

from dataclasses import dataclass
from typing import Any

from textual.content import Content
from textual.widgets import Static

from edgeinfer_tui.output.byte_sizes import shown_bytes

PLACES = {"gpu": "GPU", "cpu": "CPU", "disk": "disk"}
SIGNS = {"weights": "#", "keys and values": "=", "draft": "+", "workspace": "-"}
"""Kind of bytes -> fill character, since a terminal may have no colours."""
COLOURS = {
    "weights": "$primary",
    "keys and values": "$warning",
    "draft": "$success",
    "workspace": "$text-muted",
}
FREE = "."


@dataclass(frozen=True)
class PlaceShare:
    """Bytes by kind on one device; `room`: usable bytes, 0 if unknown."""

    place: str
    kinds: dict[str, int]
    room: int

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


def place_shares(plan: Any) -> list[PlaceShare]:
    """The devices that a plan uses. `plan`: a `MemoryPlan`."""
    shares = []
    for place, name in PLACES.items():
        kinds = dict.fromkeys(SIGNS, 0)
        for item in plan.items:
            if item.device == place:
                kinds[_kind(item.item)] += item.bytes
        room = {"gpu": plan.vram_bytes, "cpu": plan.ram_bytes}.get(place, 0)
        if any(kinds.values()):
            shares.append(PlaceShare(name, {kind: size for kind, size in kinds.items() if size}, room))
    return shares


def _kind(item: str) -> str:
    if "draft" in item:
        return "draft"
    if "keys and values" in item:
        return "keys and values"
    return "workspace" if "workspace" in item else "weights"


def drawn(shares: list[PlaceShare], width: int) -> list[Content]:
    """Lines of at most `width` columns: for each device a bar of its usable memory and a legend."""
    lines: list[Content] = []
    for share in shares:
        of = f" of {shown_bytes(share.room)}" if share.room else ""
        lines.append(Content.styled(f"{share.place}  {shown_bytes(share.total)}{of}", "bold"))
        lines.append(_bar(share, width))
        for kind, size in share.kinds.items():
            sign = Content.styled(SIGNS[kind], COLOURS[kind])
            lines.append(Content.assemble(sign, f" {kind:<16}{shown_bytes(size):>10}"))
        lines.append(Content(""))
    return lines[:-1]


def _bar(share: PlaceShare, width: int) -> Content:
    """Every kind gets at least one column, however small it is."""
    whole = max(share.room, share.total)
    parts = []
    left = width
    for kind, size in share.kinds.items():
        columns = min(left, max(1, round(width * size / whole)))
        left -= columns
        parts.append(Content.styled(SIGNS[kind] * columns, COLOURS[kind]))
    return Content.assemble(*parts, FREE * left)


class MemoryPanel(Static):
    """Next to the messages, or in their place on narrow screens."""

    DEFAULT_CSS = """
    MemoryPanel {
        display: none; width: 36; height: 1fr; padding: 0 1; border-left: solid $primary; overflow-y: auto;
    }
    """

    def __init__(self) -> None:
        super().__init__(id="memory", markup=False)
        self._plan: Any = None
        self._remarks: tuple[str, ...] = ()

    def show(self, plan: Any, remarks: tuple[str, ...] = ()) -> None:
        """`plan` None: another engine places the bytes. `remarks`: warnings from loading."""
        self._plan, self._remarks = plan, remarks
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def _draw(self) -> None:
        if self._plan is None:
            self.update(Content("no model is loaded, or its engine has no plan"))
            return
        plan, width = self._plan, max(10, self.content_size.width)
        lines = [Content.styled("Memory", "bold underline"), *drawn(place_shares(plan), width), Content("")]
        if (rate := plan.prediction.decode_tokens_per_second) > 0:
            lines.append(Content(f"expected: {rate:.1f} t/s" if rate < 10 else f"expected: {rate:.0f} t/s"))
        lines += [Content(f"so that it fits, {step}") for step in plan.steps]
        lines += [Content(remark) for remark in self._remarks]
        self.update(Content("\n").join(lines))
