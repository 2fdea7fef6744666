"""Sampling on the device: the top candidates of each slice, then one program that samples from them.

Stage 1 applies penalties to the logits of recent tokens and keeps the KEPT largest of every slice of the
vocabulary. Stage 2 merges them, filters candidates by top-k, top-p and min-p, in this order, and samples one
at a temperature. If the request needs candidates beyond the KEPT largest, no token is sampled and the status
reports it. The host then samples from the logits, which are unchanged.

A candidate is one int64 *key*: the high 32 bits are the logit's bits, in an order-preserving form, the low 32
bits the complement of its id. So descending keys are descending logits, with the lowest id first among
equals.
"""

import math
from dataclasses import dataclass, fields
from operator import attrgetter

import torch
import triton
import triton.language as tl

from edgeinfer_kernels.backend import SamplingSettings
from edgeinfer_kernels.cuda.triton_ops.step_words import CACHED_AT, POSITIONS_AT, SEQUENCES_AT
from edgeinfer_kernels.cuda.triton_ops.tiles import release_consumers, wait_for_producers
from edgeinfer_kernels.sizes.cuda_buffers import KEPT, REQUEST_SIZE, SLICE

SAMPLED, TOO_FEW_CANDIDATES, INVALID_LOGITS = 0, 1, 2
"""Statuses: a token was sampled; more candidates are needed than were kept; the logits have NaN, +inf, or no
finite value.
"""

COLDEST = tl.constexpr(1e-30)
NO_KEY = tl.constexpr(-(2**63))
LOW_WORD = tl.constexpr(0xFFFFFFFF)
_TOO_FEW = tl.constexpr(TOO_FEW_CANDIDATES)
_NO_NUMBERS = tl.constexpr(INVALID_LOGITS)


@dataclass(frozen=True)
class DeviceSamplingParams:
    """Sampling parameters that the device supports; 0, or 1 for top_p, disables a filter."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    @classmethod
    def of(cls, settings: SamplingSettings) -> "DeviceSamplingParams":
        """Those of a request."""
        return cls(*_values(settings))

    def request(self, recent: int, uniform: float) -> list[float]:
        """A sampling request for the device, (REQUEST_SIZE,) float64.

        `recent`: how many of the recent ids get penalties, 0: none. `uniform`: a uniform number in [0, 1).
        """
        lowest = math.log(self.min_p) if self.min_p > 0 else -math.inf
        numbers = [self.temperature, self.top_k, self.top_p, lowest]
        numbers += [self.repeat_penalty, self.frequency_penalty, self.presence_penalty, recent, uniform]
        return [float(number) for number in numbers]


_values = attrgetter(*(field.name for field in fields(DeviceSamplingParams)))


@triton.jit
def sorting_keys(logits, ids, mask):
    # -0.0 and 0.0 compare equal; negative floats decrease as their bits increase.
    logits = tl.where(logits == 0.0, 0.0, logits)
    bits = logits.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return tl.where(mask, (ordered << 32) | (~ids.to(tl.int64) & LOW_WORD), NO_KEY)


@triton.jit
def logits_of(keys):
    ordered = (keys >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def ids_of(keys):
    return (~keys & LOW_WORD).to(tl.int32)


@triton.jit
def _penalized(logits, ids, request, recent_ids, RECENT_PIECE: tl.constexpr):
    count = tl.load(request + 7).to(tl.int32)
    if count > 0:
        times = tl.zeros_like(logits)
        for first in range(0, count, RECENT_PIECE):
            at = first + tl.arange(0, RECENT_PIECE)
            recent = tl.load(recent_ids + at, mask=at < count, other=-1)
            times += tl.sum((ids[:, None] == recent[None, :]).to(tl.float32), axis=1)
        factor = tl.load(request + 4).to(tl.float32)
        lowered = tl.where(logits > 0, logits / factor, logits * factor)
        lowered = lowered - times * tl.load(request + 5).to(tl.float32) - tl.load(request + 6).to(tl.float32)
        logits = tl.where(times > 0, lowered, logits)
    return logits


@triton.jit
def candidates_kernel(
    logits_rows,
    requests,
    recent_rows,
    keys_out,
    peaks_out,
    masses_out,
    broken_out,
    vocabulary,
    recent_room,
    SLICE: tl.constexpr,
    KEPT: tl.constexpr,
    REQUEST_SIZE: tl.constexpr,
):
    """The KEPT largest keys of a slice, descending; its largest logit, Σ exp(logit - largest), and a NaN
    flag.

    Reads SLICE · 4 bytes, writes KEPT · 8. Grid: slices, rows of logits.
    """
    piece, row = tl.program_id(0), tl.program_id(1)
    slot = row * tl.num_programs(0) + piece
    request = requests + row * REQUEST_SIZE
    ids = piece * SLICE + tl.arange(0, SLICE)
    mask = ids < vocabulary
    logits = tl.load(logits_rows + row.to(tl.int64) * vocabulary + ids, mask=mask, other=float("-inf"))
    logits = _penalized(logits, ids, request, recent_rows + row * recent_room, 16)
    broken = tl.max(((logits != logits) | (logits == float("inf"))).to(tl.int32), axis=0)
    peak = tl.max(logits, axis=0)
    level = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peaks_out + slot, peak)
    tl.store(masses_out + slot, tl.sum(tl.exp(logits - level), axis=0))
    tl.store(broken_out + slot, broken)
    best = tl.topk(sorting_keys(logits, ids, mask), KEPT)
    tl.store(keys_out + slot * KEPT + tl.arange(0, KEPT), best)


@triton.jit
def _whole_mass(peaks, masses, slot, slices, peak, SLICES: tl.constexpr):
    at = tl.arange(0, SLICES)
    within = at < slices
    own = tl.load(peaks + slot + at, mask=within, other=float("-inf"))
    mass = tl.load(masses + slot + at, mask=within, other=0.0)
    return tl.sum((mass * tl.exp(own - peak)).to(tl.float64), axis=0)


@triton.jit
def _survivors(keys, logits, peak, mass, request, vocabulary, KEPT: tl.constexpr):
    """Which candidates pass the filters, and whether some that were not kept would pass too."""
    rank = tl.arange(0, KEPT)
    stays = keys != NO_KEY
    top_k = tl.load(request + 1).to(tl.int32)
    top_p = tl.load(request + 2)
    lowest = tl.load(request + 3).to(tl.float32)
    all_here = vocabulary <= KEPT
    limited = (top_k > 0) & (top_k <= KEPT)
    more = (not all_here) & (not limited)
    too_few = False
    if top_k > 0:
        stays = stays & (rank < top_k)
    if top_p < 1.0:
        shares = tl.where(stays, tl.exp(logits - peak), 0.0).to(tl.float64)
        here = tl.sum(shares, axis=0)
        # The mass is unknown for more than KEPT candidates that are not all of them.
        too_few = more & (top_k > 0) & (top_k < vocabulary)
        shares = shares / tl.where(more, mass, here)
        before = tl.cumsum(shares, axis=0) - shares
        more = more & (tl.sum(shares, axis=0) < top_p)
        stays = stays & ((rank == 0) | (before < top_p))
    reaches = logits >= peak + lowest
    more = more & (tl.min(reaches.to(tl.int32), axis=0) == 1)
    return stays & reaches, too_few | more


@triton.jit
def _sampled(keys, logits, stays, peak, request):
    """Inverse transform sampling over ascending ids, with sums in float64, as on the host."""
    temperature = tl.maximum(tl.load(request).to(tl.float32), COLDEST)
    weights = tl.where(stays, tl.exp((logits - peak) / temperature), 0.0)
    by_id = tl.sort((ids_of(keys).to(tl.int64) << 32) | weights.to(tl.int32, bitcast=True).to(tl.int64))
    ids = (by_id >> 32).to(tl.int32)
    weights = (by_id & LOW_WORD).to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64)
    reached = tl.cumsum(weights, axis=0)
    target = tl.load(request + 8) * tl.sum(weights, axis=0)
    possible = weights > 0
    last = tl.max(tl.where(possible, ids, -1), axis=0)
    return tl.min(tl.where(possible & (reached > target), ids, last), axis=0)


@triton.jit
def _report(sampled, results, row, token, status):
    if status == 0:
        tl.store(sampled + row, token)
    tl.store(results + row * 2, tl.where(status == 0, token, -1))
    tl.store(results + row * 2 + 1, status)


@triton.jit
def sample_kernel(
    keys_in,
    peaks,
    masses,
    broken,
    requests,
    sampled,
    results,
    vocabulary,
    slices,
    SLICES: tl.constexpr,
    KEPT: tl.constexpr,
    REQUEST_SIZE: tl.constexpr,
):
    """Sample one token of a row's candidates: the argmax at temperature 0, else a random one that passes the
    filters.

    Reads slices · (KEPT · 8 + 12) bytes. Grid: rows of logits.
    """
    row = tl.program_id(0)
    slot = row * slices
    request = requests + row * REQUEST_SIZE
    at = tl.arange(0, SLICES * KEPT)
    keys = tl.load(keys_in + slot * KEPT + at, mask=at < slices * KEPT, other=NO_KEY)
    keys = tl.topk(keys, KEPT)
    best = tl.max(keys, axis=0)
    peak = logits_of(best)
    pieces = tl.arange(0, SLICES)
    wrong = tl.max(tl.load(broken + slot + pieces, mask=pieces < slices, other=0), axis=0)
    wrong = (wrong > 0) | (peak == float("-inf"))
    level = tl.where(wrong, 0.0, peak)
    logits = tl.where(keys == NO_KEY, float("-inf"), logits_of(keys))
    mass = _whole_mass(peaks, masses, slot, slices, level, SLICES)
    stays, too_few = _survivors(keys, logits, level, mass, request, vocabulary, KEPT)
    token = _sampled(keys, logits, stays, level, request)
    greedy = tl.load(request) == 0.0
    token = tl.where(greedy, ids_of(best), token)
    status = tl.where(wrong, _NO_NUMBERS, tl.where(too_few & (not greedy), _TOO_FEW, 0))
    _report(sampled, results, row, token, status)


@triton.jit
def best_of_slices_kernel(logits_rows, keys_out, broken_out, vocabulary, SLICE: tl.constexpr):
    """The largest key of a slice, and whether one of its logits is NaN. Reads SLICE · 4 bytes."""
    piece, row = tl.program_id(0), tl.program_id(1)
    slot = row * tl.num_programs(0) + piece
    ids = piece * SLICE + tl.arange(0, SLICE)
    mask = ids < vocabulary
    logits = tl.load(logits_rows + row.to(tl.int64) * vocabulary + ids, mask=mask, other=float("-inf"))
    tl.store(broken_out + slot, tl.max(((logits != logits) | (logits == float("inf"))).to(tl.int32), axis=0))
    tl.store(keys_out + slot, tl.max(sorting_keys(logits, ids, mask), axis=0))


@triton.jit
def argmax_kernel(keys_in, broken, sampled, results, slices, SLICES: tl.constexpr):
    """The argmax over all slices. Reads slices · 12 bytes. Grid: rows of logits."""
    row = tl.program_id(0)
    piece = tl.arange(0, SLICES)
    within = piece < slices
    best = tl.max(tl.load(keys_in + row * slices + piece, mask=within, other=NO_KEY), axis=0)
    wrong = tl.max(tl.load(broken + row * slices + piece, mask=within, other=0), axis=0)
    status = tl.where((wrong > 0) | (logits_of(best) == float("-inf")), _NO_NUMBERS, 0)
    _report(sampled, results, row, ids_of(best), status)


@dataclass(frozen=True)
class SamplingBuffers:
    """Intermediate buffers of the kernels for some rows; allocated once, so a graph can be captured."""

    keys: torch.Tensor
    peaks: torch.Tensor
    masses: torch.Tensor
    broken: torch.Tensor
    top_count: int
    slice: int

    @classmethod
    def allocate(
        cls, rows: int, vocabulary: int, device: str | torch.device, top_count: int = KEPT, slice: int = SLICE
    ) -> "SamplingBuffers":
        """Allocate for `rows` rows. The `top_count` largest logits of every `slice` ids are kept; both are
        powers of two.

        Raises:
            ValueError: `top_count` is above 256 or above `slice`, or one of them is not a power of two.
        """
        for name, value, maximum in (("top_count", top_count, min(256, slice)), ("slice", slice, 1 << 14)):
            if value & (value - 1) or not 2 <= value <= maximum:
                raise ValueError(f"{name}: saw {value}, wanted a power of two from 2 to {maximum}")
        slices = triton.cdiv(vocabulary, slice)
        return cls(
            torch.zeros((rows, slices, top_count), dtype=torch.int64, device=device),
            torch.zeros((rows, slices), dtype=torch.float32, device=device),
            torch.zeros((rows, slices), dtype=torch.float32, device=device),
            torch.zeros((rows, slices), dtype=torch.int32, device=device),
            top_count,
            slice,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(each.nbytes for each in (self.keys, self.peaks, self.masses, self.broken))


def sample(
    logits: torch.Tensor,
    requests: torch.Tensor,
    recent: torch.Tensor,
    buffers: SamplingBuffers,
    sampled: torch.Tensor,
    results: torch.Tensor,
) -> None:
    """Sample a token for each row of logits (rows, vocabulary) float32, as the host's sampler would.

    `requests` (rows, REQUEST_SIZE) float64, from `DeviceSamplingParams.request`; `recent` (rows, capacity)
    int32: ids for penalties, in any order. Writes `results` (rows, 2) int32: id (-1 unless SAMPLED) and
    status, which may be in pinned host memory, and `sampled` (rows,) int32, which is unchanged unless
    SAMPLED.
    """
    rows, vocabulary = logits.shape
    slices = buffers.keys.shape[1]
    candidates_kernel[(slices, rows)](
        logits, requests, recent, buffers.keys, buffers.peaks, buffers.masses, buffers.broken, vocabulary,
        recent.shape[1], SLICE=buffers.slice, KEPT=buffers.top_count, REQUEST_SIZE=REQUEST_SIZE, num_warps=8,
    )  # fmt: skip
    sample_kernel[(rows,)](
        buffers.keys, buffers.peaks, buffers.masses, buffers.broken, requests, sampled, results, vocabulary,
        slices, SLICES=triton.next_power_of_2(slices), KEPT=buffers.top_count, REQUEST_SIZE=REQUEST_SIZE,
        num_warps=8,
    )  # fmt: skip


def argmax(
    logits: torch.Tensor, buffers: SamplingBuffers, sampled: torch.Tensor, results: torch.Tensor
) -> None:
    """The argmax of each row, the lowest id among equals; `sampled` and `results` as in `sample`."""
    rows, vocabulary = logits.shape
    slices = buffers.keys.shape[1]
    best_of_slices_kernel[(slices, rows)](
        logits, buffers.keys, buffers.broken, vocabulary, SLICE=buffers.slice, num_warps=4
    )
    argmax_kernel[(rows,)](
        buffers.keys,
        buffers.broken,
        sampled,
        results,
        slices,
        SLICES=triton.next_power_of_2(slices),
        num_warps=4,
    )


@triton.jit
def advance(state, sampled, next_id, RING: tl.constexpr):
    """Store the id (-1: none) at its token's slot in the ring, and set it as the next step's token."""
    cached = tl.load(state + CACHED_AT)
    tl.store(sampled + cached % RING, next_id)
    tl.store(state, tl.maximum(next_id, 0))
    tl.store(state + POSITIONS_AT, cached + 1)
    tl.store(state + SEQUENCES_AT, cached + 1)
    tl.store(state + CACHED_AT, cached + 1)


@triton.jit
def best_of_programs(best, PROGRAMS: tl.constexpr):
    """The largest of the head's programs, its index, and whether one has a NaN."""
    PADDED: tl.constexpr = triton.next_power_of_2(PROGRAMS)
    index = tl.arange(0, PADDED)
    value = tl.load(best + index, mask=index < PROGRAMS, other=float("-inf"))
    broken = tl.max((value != value).to(tl.int32), axis=0)
    top, top_index = tl.max(value, axis=0, return_indices=True)
    return top, top_index, broken > 0


@triton.jit
def sample_best_kernel(
    best,
    best_ids,
    state,
    sampled,
    PROGRAMS: tl.constexpr,
    RING: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The id of the largest logit, the lowest id among equals, for a step of one token; -1 if a logit is NaN.

    It is written to `sampled` (RING,) at the slot of the token's position, and to `state` as the next step's
    token.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    top, top_index, broken = best_of_programs(best, PROGRAMS)
    next_id = tl.where(broken | (top == float("-inf")), -1, tl.load(best_ids + top_index))
    advance(state, sampled, next_id, RING)


@triton.jit
def advance_kernel(results, state, sampled, RING: tl.constexpr):
    """Pass on the sampled token: `results` holds the id, or -1 if the host must sample."""
    advance(state, sampled, tl.load(results), RING)
