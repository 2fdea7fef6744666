"""Selects the quantization to download if none is given: the best one that is fast enough here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgeinfer.errors import DownloadError, UnsupportedModelError
from edgeinfer.planning.fit import Fit, fit
from edgeinfer.registry.model_file import bits_of
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_quant_formats.errors import FormatError

FAST_ENOUGH = 15.0
"""Minimum tokens per second: about twice the speed of reading."""
MAX_BITS = 9.0
"""Maximum bits per weight: more than those of Q8_0 don't improve quality."""
MIN_BITS = 4.0
"""Minimum bits per weight: below, a smaller model is better; used only if nothing else fits."""
GIBIBYTE = 1 << 30


@dataclass(frozen=True)
class QuantOption:
    """One available quantization. `read_sizes` downloads the first bytes of its file."""

    quant: str
    size_bytes: int
    read_sizes: Callable[[], ModelSizes]


@dataclass(frozen=True)
class QuantSelection:
    """The selected quantization, and the reason, in a line."""

    quant: str
    why: str


def select_quant(name: str, options: Sequence[QuantOption], machine: Machine) -> QuantSelection:
    """The largest up to Q8_0 that fits and reaches `FAST_ENOUGH`, else the fastest that fits and has at least
    four bits, else the largest that fits.

    Raises:
        DownloadError: none of them fits; the text names the smallest and how to download it anyway.
    """
    if len(options) == 1:
        return QuantSelection(options[0].quant, f"{options[0].quant or 'the file'}: the only one available")
    usual = [option for option in options if bits_of(option.quant) <= MAX_BITS] or list(options)
    ranked = sorted(usual, key=lambda option: -option.size_bytes)
    fitting: list[tuple[QuantOption, Fit]] = []
    for option in ranked:
        fit_of_option = _fit(option, machine)
        if not fit_of_option.fits:
            continue
        fitting.append((option, fit_of_option))
        if _is_fast(fit_of_option) and bits_of(option.quant) >= MIN_BITS:
            return QuantSelection(
                option.quant,
                _why(option, fit_of_option, machine, ranked, "the best of {} that fits and is fast"),
            )
    if not fitting:
        raise DownloadError(_none_fits(name, ranked[-1], machine))
    good = [pair for pair in fitting if bits_of(pair[0].quant) >= MIN_BITS]
    option, fit_of_option = good[-1] if good else fitting[0]
    rank = "the fastest of {} that is still good" if good else "the best of {} that fits"
    return QuantSelection(option.quant, _why(option, fit_of_option, machine, ranked, rank))


def _fit(option: QuantOption, machine: Machine) -> Fit:
    """How it fits this machine; from its size only if its header has too little data."""
    room = _room(machine)
    if option.size_bytes > room:
        return Fit(False, option.size_bytes)
    try:
        return fit(option.read_sizes(), machine)
    except (UnsupportedModelError, FormatError):
        needed = option.size_bytes + GIBIBYTE
        return Fit(needed <= room, needed)


def _is_fast(fit: Fit) -> bool:
    return fit.tokens_per_second is None or fit.tokens_per_second >= FAST_ENOUGH


def _room(machine: Machine) -> int:
    return machine.processor.free_bytes + (machine.graphics.free_bytes if machine.graphics else 0)


def _why(option: QuantOption, fit: Fit, machine: Machine, ranked: Sequence[QuantOption], rank: str) -> str:
    """For example: Q6_K: the best of Q8_0, Q6_K, Q4_K_M that fits and is fast: takes 7.1 of 20.3 free GiB,
    ...
    """
    reason = rank.format(", ".join(other.quant for other in ranked))
    taken = (fit.nbytes or option.size_bytes) / GIBIBYTE
    room = f"takes {taken:.1f} of {_room(machine) / GIBIBYTE:.1f} free GiB"
    if fit.tokens_per_second is None:
        return f"{option.quant}: {reason}: {room}"
    assumed = "" if machine.origin != "unmeasured" else ", assuming 20 GB/s of memory"
    return f"{option.quant}: {reason}: {room}, about {fit.tokens_per_second:.0f} tokens/s{assumed}"


def _none_fits(name: str, smallest: QuantOption, machine: Machine) -> str:
    size, room = smallest.size_bytes / GIBIBYTE, _room(machine) / GIBIBYTE
    return (
        f"{name}: no quantization fits this machine; the smallest, {smallest.quant}, has {size:.1f} GiB, "
        f"{room:.1f} GiB are free; take a smaller model, or name it: edgeinfer pull {name}:{smallest.quant}"
    )
