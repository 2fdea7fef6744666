"""Measures the speed of a GPU and its link: memory reads, matmul, copies in both directions, exchange of a
layer.

On a device without CUDA (the CPU, in tests) the host's clock is used; these figures are meaningless.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from edgeinfer_kernels.cpu.layout.fields import ROWS_PER_GROUP
from edgeinfer_kernels.cuda.current_device import capturing, current
from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.decode.workspace import Workspace
from edgeinfer_kernels.cuda.device_memory import Arena, DeviceMemoryError, Uploader
from edgeinfer_kernels.cuda.offload.weight_streamer import pin_in_place, unpin
from edgeinfer_kernels.cuda.triton_ops.unpacking import unpack
from edgeinfer_kernels.cuda.tuning.exchange_speed import stage_seconds
from edgeinfer_kernels.cuda.tuning.step_shapes import Tuning
from edgeinfer_kernels.cuda.weights.device_model import DeviceModel
from edgeinfer_kernels.cuda.weights.plane_formats import STREAMED
from edgeinfer_kernels.one_layer import one_layer
from edgeinfer_kernels.sizes.cuda_buffers import STREAMED_PIECE_BYTES
from edgeinfer_kernels.sizes.cuda_matrices import matrix_bytes
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_quant_formats import block_format

READ_BYTES = 1 << 30
COPY_BYTES = 128 << 20
HEAD_BYTES = 256 << 20
"""Bytes of the matrix for the measurement of a format: more than caches hold."""
SMALL_ROWS = 2048
ACTIVATION_BYTES = 16 << 10
"""Bytes of one token's activations, float32, hidden_size 4096."""
ROUNDS = 10
SYNC_ROUNDS = 200
REPEATS = 8
"""Launches of a head in one graph."""
HEAD_LAUNCHES = 2
MATRIX = 4096
PINNED_BYTES = 4 << 20


@dataclass(frozen=True)
class GpuSpeed:
    """Bytes per second of reads; operations per second of a float16 matmul; bytes per second of copies,
    pinned and pageable; seconds of a round trip of activations to the host; 1 if the round trip works within
    a graph, else 0; and whether main memory can be pinned in place.
    """

    bytes_per_second: float
    operations_per_second: float
    to_gpu: float
    from_gpu: float
    pageable_to_gpu: float
    pageable_from_gpu: float
    sync_seconds: float
    meets_in_graph: float
    pins_in_place: float


@dataclass(frozen=True)
class FormatSpeed:
    """Bytes per second of a format's words and scales in a decode step, and the seconds of a launch; and
    bytes per second of the host layout that are converted to float16 for prefill.
    """

    bytes_per_second: float
    launch_seconds: float
    unpacked_per_second: float


def gpu_speed(
    device: torch.device, read_bytes: int = READ_BYTES, copy_bytes: int = COPY_BYTES, matrix: int = MATRIX
) -> GpuSpeed:
    """Run all measurements, in about a second; at most a quarter of the free memory is used, and released.

    Raises `DeviceMemoryError`: too little free memory.
    """
    if device.type != "cuda":
        return _gpu_speed(device, read_bytes, copy_bytes, matrix)
    free, _ = torch.cuda.mem_get_info(device)
    try:
        with current(device):
            return _gpu_speed(device, min(read_bytes, free // 4), min(copy_bytes, free // 4), matrix)
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(f"the GPU has too little memory to be measured: {error}") from error
    finally:
        torch.cuda.empty_cache()


def _gpu_speed(device: torch.device, read_bytes: int, copy_bytes: int, matrix: int) -> GpuSpeed:
    # Allocate the library's workspace first, which it keeps: if it were cut from a larger block, all of that
    # block would be kept.
    a, b = (torch.ones((matrix, matrix), dtype=torch.float16, device=device) for _ in range(2))
    multiplying = _best_seconds(device, lambda: torch.mm(a, b))
    reading = _reading(device, read_bytes)
    pinned, pageable = (_copies(device, copy_bytes, pinned) for pinned in (True, False))
    stage = stage_seconds(device)
    return GpuSpeed(
        bytes_per_second=read_bytes / reading,
        operations_per_second=2 * matrix**3 / multiplying,
        to_gpu=copy_bytes / pinned[0],
        from_gpu=copy_bytes / pinned[1],
        pageable_to_gpu=copy_bytes / pageable[0],
        pageable_from_gpu=copy_bytes / pageable[1],
        sync_seconds=_sync_seconds(device) if stage is None else stage,
        meets_in_graph=float(stage is not None),
        pins_in_place=float(_pins_in_place(device)),
    )


def _pins_in_place(device: torch.device) -> bool:
    """Whether the system can pin memory that is already allocated."""
    memory = torch.zeros(PINNED_BYTES, dtype=torch.uint8)
    if device.type != "cuda":
        return True
    pinned = pin_in_place(memory, device)
    if pinned:
        unpin(memory)
    return pinned


def _reading(device: torch.device, nbytes: int) -> float:
    """Seconds to read `nbytes` bytes once."""
    numbers = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    return _best_seconds(device, lambda: torch.sum(numbers))


def _best_seconds(device: torch.device, work: Callable[[], object]) -> float:
    """The fastest of some rounds, by the device's clock; one warm-up round is not counted."""
    work()
    return min(_seconds(device, work) for _ in range(ROUNDS))


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _host(nbytes: int, pinned: bool) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned and torch.cuda.is_available())


def _copies(device: torch.device, nbytes: int, pinned: bool) -> tuple[float, float]:
    """Seconds of a copy to the device, and of a copy back."""
    here, there = _host(nbytes, pinned), torch.zeros(nbytes, dtype=torch.uint8, device=device)
    return (
        _best_seconds(device, lambda: there.copy_(here, non_blocking=pinned)),
        _best_seconds(device, lambda: here.copy_(there, non_blocking=pinned)),
    )


def _sync_seconds(device: torch.device) -> float:
    """The median of a copy of activations to the host, an awaited event, and a copy back; by the host's
    clock.
    """
    here, there = (
        _host(ACTIVATION_BYTES, True),
        torch.zeros(ACTIVATION_BYTES, dtype=torch.uint8, device=device),
    )
    event = torch.cuda.Event() if device.type == "cuda" else None
    durations = []
    for _ in range(SYNC_ROUNDS):
        begin = time.perf_counter()
        here.copy_(there, non_blocking=True)
        if event:
            event.record()
            event.synchronize()
        there.copy_(here, non_blocking=True)
        durations.append(time.perf_counter() - begin)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return sorted(durations)[SYNC_ROUNDS // 2]


def format_speed(
    device: torch.device,
    format_name: str,
    head_bytes: int = HEAD_BYTES,
    small_rows: int = SMALL_ROWS,
    streaming_bytes: int = STREAMED_PIECE_BYTES,
) -> FormatSpeed:
    """Time the head kernel of a decode step on a large and on a small matrix of the format.

    The difference is reading; the rest of the small one is launch time. Raises `UnsupportedOnDeviceError`, or
    `DeviceMemoryError`: too little free memory.
    """
    small = timed_head(device, format_name, small_rows)
    rows = max(head_bytes * small_rows // small.nbytes // 16 * 16, 2 * small_rows)
    large = timed_head(device, format_name, rows)
    rate = (large.nbytes - small.nbytes) / max(large.seconds - small.seconds, 1e-9)
    starting = max(small.seconds - small.nbytes / rate, 0.0) / HEAD_LAUNCHES
    unpacked = _unpacking(device, format_name, streaming_bytes) if format_name in STREAMED else rate
    return FormatSpeed(rate, starting, unpacked)


class Head(NamedTuple):
    """Seconds of a head, and the bytes of its matrix on the device."""

    seconds: float
    nbytes: int


def timed_head(device: torch.device, format_name: str, rows: int) -> Head:
    """Measure a head of `rows` rows."""
    with current(device):
        return _timed_head(device, format_name, rows)


def _timed_head(device: torch.device, format_name: str, rows: int) -> Head:
    specification, weights = one_layer(format_name, rows)
    counting = Arena()
    Workspace(DeviceModel(specification, weights, counting, 16), counting)
    arena = Arena(device, counting.used)
    try:
        model = DeviceModel(specification, weights, arena, 16)
        launches = StepLaunches(model, Workspace(model, arena), Tuning(), dependent=False)
        step = DecodeStep(launches)
        uploader = Uploader(device)
        try:
            model.fill(uploader)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(f"the GPU has too little memory to be measured: {error}") from error
        finally:
            uploader.close()
        seconds = _head_seconds(device, step)
        del step, launches, model
    finally:
        arena.close()
    return Head(seconds, matrix_bytes(ModelSizes.of(specification, weights).head))


def _unpacking(device: torch.device, format_name: str, nbytes: int) -> float:
    """Bytes per second of the host layout that are converted to float16."""
    format_name = block_format(format_name).repacked_as or format_name
    group_bytes = ROWS_PER_GROUP * block_format(format_name).row_bytes(MATRIX)
    groups = max(nbytes // group_bytes, 1)
    raw = torch.zeros(groups * group_bytes, dtype=torch.uint8, device=device)
    out = torch.empty((groups * ROWS_PER_GROUP, MATRIX), dtype=torch.float16, device=device)
    with current(device):
        return len(raw) / _best_seconds(device, lambda: unpack(raw, format_name, MATRIX, out))


def _head_seconds(device: torch.device, step: DecodeStep) -> float:
    """Seconds of one head, captured in a graph and replayed as in normal use."""
    if device.type != "cuda":
        return _best_seconds(device, lambda: step.head_of(1))
    step.head_of(1)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with capturing(device, graph):
        for _ in range(REPEATS):
            step.head_of(1)
    return _best_seconds(device, graph.replay) / REPEATS
