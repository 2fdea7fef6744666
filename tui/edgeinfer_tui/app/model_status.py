"""What the screen shows of the model: the memory panel, and the status bar with context use and speed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from textual.content import Content
from textual.widgets import Static

from edgeinfer_tui.output.columns import shown_bytes
from edgeinfer_tui.output.status_line import context_used, of_context

if TYPE_CHECKING:
    from edgeinfer.results import Generation

DEVICES = {"gpu": "GPU", "cpu": "CPU", "disk": "disk"}
"""Names of devices; those of further GPUs have a number."""
COLOURS = {
    "weights": "$text-primary",
    "KV cache": "$text-warning",
    "draft": "$text-success",
    "other": "",
    "free": "dim",
}
"""Kind of bytes -> color of its bar. Each kind has its own line, since a terminal may have no colors."""
WEIGHTS = ("layer ", "head", "embedding", "per-layer ")
"""How the names of items with weights begin."""
EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class DeviceShare:
    """Bytes by kind on one device; `room`: usable bytes, 0 if unknown."""

    device: str
    kinds: dict[str, int]
    room: int

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


def device_shares(plan: Any) -> list[DeviceShare]:
    """The devices that a plan uses. `plan`: a `MemoryPlan`."""
    shares = []
    gpus = sorted({item.device for item in plan.items if item.device.startswith("gpu")})
    names = {gpu: gpu.replace("gpu", "GPU ", 1).rstrip() for gpu in gpus} | DEVICES
    for device, name in names.items():
        kinds = dict.fromkeys(COLOURS, 0)
        for item in plan.items:
            if item.device == device:
                kinds[_kind(item.item)] += item.bytes
        room = plan.budgets.get(device, 0)
        if any(kinds.values()):
            shares.append(DeviceShare(name, {kind: size for kind, size in kinds.items() if size}, room))
    return shares


def _kind(item: str) -> str:
    if "draft" in item:
        return "draft"
    if "keys and values" in item:
        return "KV cache"
    return "weights" if item.startswith(WEIGHTS) else "other"


def where_it_runs(plan: Any) -> str:
    """The devices that compute the layers. `plan`: a `MemoryPlan`; None: another engine places them."""
    if plan is None:
        return "another engine decides"
    sizes = dict.fromkeys(DEVICES, 0)
    for item in plan.items:
        if item.item.startswith(("layer ", "head")) and _kind(item.item) == "weights":
            sizes[item.device] = sizes.get(item.device, 0) + item.bytes
    gpus = [nbytes for device, nbytes in sizes.items() if device.startswith("gpu") and nbytes]
    gpu, total = sum(gpus), sum(sizes.values())
    if gpu in (0, total):
        return "CPU" if not gpu else "GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs, one after another"
    share = min(99, max(1, round(100 * gpu / total)))
    return f"GPU and CPU, split: {share} % of the weights on the GPU"


def drawn(shares: list[DeviceShare], width: int) -> list[Content]:
    """Lines of at most `width` columns: for each device its kinds of bytes, with bars of one scale."""
    lines: list[Content] = []
    for share in shares:
        of = f" of {shown_bytes(share.room)}" if share.room else ""
        lines.append(Content.styled(f"{share.device}  {shown_bytes(share.total)}{of}", "bold"))
        free = max(0, share.room - share.total)
        kinds = {**share.kinds, "free": free} if share.room else share.kinds
        for kind, size in kinds.items():
            columns = max(1, width - 20)
            filled = bar(size / max(share.room, share.total), columns)
            shown = Content.styled(f"{filled:<{columns}}", COLOURS[kind])
            lines.append(Content.assemble(f"{kind:<9}", shown, f"{shown_bytes(size):>11}"))
        lines.append(Content(""))
    return lines[:-1]


def bar(share: float, columns: int) -> str:
    """A share of `columns` in eighths of a column; one eighth at least, unless the share is 0."""
    eighths = max(round(8 * columns * share), 1 if share > 0 else 0)
    full, rest = divmod(eighths, 8)
    return "█" * full + EIGHTHS[rest].strip()


class MemoryPanel(Static):
    """Next to the messages, or instead of them on narrow screens."""

    DEFAULT_CSS = """
    MemoryPanel {
        display: none; width: 36; height: 1fr; padding: 0 1; border-left: solid $primary; overflow-y: auto;
    }
    """

    def __init__(self) -> None:
        super().__init__(id="memory", markup=False)
        self._plan: Any = None
        self._warnings: tuple[str, ...] = ()

    def show(self, plan: Any, warnings: tuple[str, ...] = ()) -> None:
        """`plan` None: another engine places the bytes. `warnings`: warnings from loading."""
        self._plan, self._warnings = plan, warnings
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def _draw(self) -> None:
        if self._plan is None:
            self.update(Content("no model is loaded, or its engine has no plan"))
            return
        plan, width = self._plan, max(10, self.content_size.width)
        lines = [Content.styled("Memory", "bold underline"), *drawn(device_shares(plan), width), Content("")]
        if (rate := plan.prediction.decode_tokens_per_second) > 0:
            lines.append(Content(f"expected: {rate:.1f} t/s" if rate < 10 else f"expected: {rate:.0f} t/s"))
        lines += [Content(f"so that it fits, {relaxation}") for relaxation in plan.relaxations]
        lines += [Content(warning) for warning in self._warnings]
        self.update(Content("\n").join(lines))


BAR = 8


def status_text(
    width: int,
    used: int | None,
    context: int | None,
    completion: "Generation | None",
    tail: Sequence[str] = (),
) -> str:
    """Status fields in order of priority, as many as fit `width` columns; `tail`: hints shown if they fit.
    `context` None: no model is loaded; 0: it is unknown.
    """
    count = "-" if used is None else str(used)
    parts = ["no model yet" if context is None else f"{count}{of_context(context)} tokens"]
    if completion is not None:
        rate = completion.speed.decode_tokens_per_second
        if rate > 0:
            parts.append(f"{rate:.1f} t/s" if rate < 10 else f"{rate:.0f} t/s")
        if completion.speed.accepted_share is not None:
            parts.append(f"drafts {completion.speed.accepted_share:.0%}")
    parts += tail
    text = parts[0]
    for part in parts[1:]:
        if len(text) + 3 + len(part) > width - 2:
            break
        text += f" · {part}"
    if used is not None and context and len(text) + BAR + 3 <= width - 2:
        text = f"{_usage_bar(used / context)} {text}"
    return text


def keys_text(width: int, keys: Sequence[str]) -> str:
    """Keys with descriptions, as many as fit `width` columns; the last one, which goes back, is always
    shown.
    """
    shown = list(keys)
    while len(shown) > 1 and len(" · ".join(shown)) > width - 2:
        del shown[-2]
    return " · ".join(shown)


def _usage_bar(share: float) -> str:
    full = min(BAR, round(share * BAR))
    return f"[{'#' * full}{'.' * (BAR - full)}]"


class StatusBar(Static):
    """The status line."""

    def __init__(self) -> None:
        super().__init__(id="status", markup=False)
        self._state: tuple[int | None, int | None, Generation | None, Sequence[str]] = (
            None,
            None,
            None,
            (),
        )
        self._keys: Sequence[str] = ()

    def show(
        self,
        completion: "Generation | None",
        context: int | None,
        tail: Sequence[str] = (),
        used: int | None = None,
    ) -> None:
        """`used`: tokens in the context; None: taken from `completion`."""
        taken = used if completion is None else context_used(completion)
        self._state, self._keys = (taken, context, completion, tail), ()
        self._draw()

    def show_keys(self, keys: Sequence[str]) -> None:
        """Show the keys of the focused message instead, as many as fit."""
        self._keys = keys
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def _draw(self) -> None:
        if self._keys:
            self.update(Content(keys_text(self.size.width, self._keys)))
            return
        used, context, completion, tail = self._state
        self.update(Content(status_text(self.size.width, used, context, completion, tail)))
