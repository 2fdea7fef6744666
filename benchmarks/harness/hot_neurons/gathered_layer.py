"""A feed-forward on a GPU that gathers active neurons, against the dense one, in captured graphs.

python benchmarks/hot_neurons.py --one-layer --device cuda --shapes relu-7b,relu2-4b --types Q4_0,Q8_0,Q4_K
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch

from edgeinfer.benchmarking.machine import command_line, this_machine
from edgeinfer.benchmarking.tables import markdown
from edgeinfer.errors import SettingError
from edgeinfer_kernels.blocks.feed_forward import FeedForwardSpec, FeedForwardWeights
from edgeinfer_kernels.cpu.sparse import dense_layer, factor_bytes, scattered_bytes
from edgeinfer_kernels.cuda.backend import DEPENDENT_LAUNCH_FROM
from edgeinfer_kernels.cuda.blocks import feed_forward
from edgeinfer_kernels.cuda.current_device import capturing, current
from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.decode.step_norms import NextNorm
from edgeinfer_kernels.cuda.decode.workspace import Workspace
from edgeinfer_kernels.cuda.device_memory import Arena, Uploader
from edgeinfer_kernels.cuda.device_parts import compute_capability, cuda_device
from edgeinfer_kernels.cuda.driver import list_gpus
from edgeinfer_kernels.cuda.tuning.step_shapes import usual_tuning
from edgeinfer_kernels.cuda.tuning.step_timer import replay_seconds
from edgeinfer_kernels.cuda.tuning.targets import compile_launch, recorded_launches
from edgeinfer_kernels.cuda.weights.device_model import DeviceModel
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_kernels.sizes.gathered_neurons import why_not_gathered
from edgeinfer_quant_formats import block_format
from harness import suites
from harness.cuda_runs import gpu_name
from harness.planted_neurons import PlantedShape, find_planted, planted_decoder, planted_inputs

HEAD = (
    *("feed-forward", "active", "tokens", "dense", "gathered", "of dense", "by bytes", "dense GB/s"),
    *("listed", "error"),
)
BYTES_OF_WEIGHTS = 200 << 20
"""Layers are added until their weights exceed the caches of a large GPU."""
REPLAYS, CONTEXT = 20, 64
COMPILED_FOR = 90
COMPILED_HEAD = ("kernel", "for", "tokens", "warps", "registers", "spilled bytes", "shared bytes")


@dataclass(frozen=True)
class Measured:
    """Seconds of a layer, its sum of x, and the share of the neurons that it lists (0: it is dense)."""

    seconds: float
    x: npt.NDArray[np.float32]
    listed: float


class Layers:
    """The feed-forwards of a decoder, one after another; without a device their memory is only counted."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        arena: Arena,
        capability: int,
        gathered: tuple[int, ...],
    ) -> None:
        self.model = DeviceModel(spec, weights, arena, CONTEXT, gathered=gathered)
        self._space = Workspace(self.model, arena)
        dependent = capability >= DEPENDENT_LAUNCH_FROM
        launches = StepLaunches(self.model, self._space, usual_tuning(capability), dependent=dependent)
        self._step = DecodeStep(launches)
        self._blocks = [
            (number, block)
            for number, block in enumerate(self.model.blocks)
            if isinstance(block.residual.block, FeedForwardSpec)
        ]

    @classmethod
    def on(
        cls, device: torch.device, spec: DecoderSpec, weights: DecoderWeights, gathered: tuple[int, ...]
    ) -> "Layers":
        """The same on a GPU, with its weights."""
        capability, counting = compute_capability(device), Arena()
        cls(spec, weights, counting, capability, gathered)
        layers = cls(spec, weights, Arena(device, counting.used), capability, gathered)
        layers.model.fill(Uploader(device))
        return layers

    def launch(self, x: torch.Tensor) -> None:
        """All feed-forwards, from the rows x on."""
        step, tokens = self._step, len(x)
        self._space.x[:tokens].copy_(x)
        number, first = self._blocks[0]
        norm = NextNorm(first.residual.norm, first.norms.norm, None)
        source = step.target(number - 1)
        step.launches.norms.add_norm(None, None, 0.0, norm, source.activations, tokens)
        for number, block in self._blocks:
            source = feed_forward.decode(step, number, block, source, tokens, 0)

    def scale_biases(self, factor: float) -> None:
        """Multiply the planted biases, which changes the share of active neurons."""
        for _, block in self._blocks:
            weights = block.weights
            bias = weights.up_bias if weights.gate is None else weights.gate_bias
            bias.mul_(factor)

    def measure(self, rows: npt.NDArray[np.float32], rounds: int) -> Measured:
        """The best of some rounds on these inputs, in a captured graph."""
        device = self._space.x.device
        x = torch.from_numpy(rows).to(device)
        self.launch(x)
        graph = torch.cuda.CUDAGraph()
        with capturing(device, graph):
            self.launch(x)
        seconds = min(replay_seconds(graph, REPLAYS) for _ in range(rounds)) / len(self._blocks)
        return Measured(seconds, *self.result(len(x)))

    def result(self, tokens: int) -> tuple[npt.NDArray[np.float32], float]:
        """x after the last feed-forward, and the share of its neurons that were listed."""
        x, gathered = self._space.x[:tokens].cpu().numpy(), self._space.gathered
        if gathered is None:
            return x, 0.0
        neurons: int = self._blocks[-1][1].weights.neurons
        return x, float(gathered.counts.sum()) / neurons


def byte_share(weights: FeedForwardWeights, active: float) -> float:
    """The share of the dense layer's bytes that a token reads with exact gates."""
    dense = sum(matrix.nbytes for matrix in weights.matrices())
    first = (weights.ffn_gate or weights.ffn_up).nbytes
    return (first + factor_bytes(weights) + scattered_bytes(weights, None, active, active)) / dense


def planted(shape: PlantedShape, kind: str, active: float) -> tuple[DecoderSpec, DecoderWeights]:
    """The decoder of a shape. Raises `SettingError`: it can't be gathered."""
    is_small = shape.name.startswith("smoke")
    layers = 2 if is_small else -(-BYTES_OF_WEIGHTS // block_format(kind).nbytes((shape.elements,)))
    spec, weights = planted_decoder(shape, kind, layers, active)
    reason = "it has experts"
    if not shape.experts:
        reason = why_not_gathered(spec.layers[0].blocks[1].block, dense_layer(weights, 0)) or ""
    if reason:
        raise SettingError(f"--shapes: {shape.name} can't be gathered: {reason}")
    return spec, weights


def compiled_rows(shape: PlantedShape, kind: str, tokens: tuple[int, ...]) -> list[list[str]]:
    """The resources of the kernels on COMPILED_FOR, without a GPU."""
    (spec, weights), rows = planted(shape, kind, 0.1), []
    for count in tokens:
        layers = Layers(spec, weights, Arena(), COMPILED_FOR, tuple(range(len(spec.layers))))
        with recorded_launches() as launches:
            layers.launch(torch.empty((count, shape.width), device="meta"))
        for launch in {launch.key: launch for launch in launches}.values():
            made = compile_launch(launch, COMPILED_FOR)
            numbers = (made.warps, made.registers, made.spilled_bytes, made.shared_bytes)
            rows.append([launch.name, f"{shape.name} {kind}", str(count), *map(str, numbers)])
    return rows


def rows_of(
    shape: PlantedShape,
    kind: str,
    shares: Sequence[float],
    tokens: Sequence[int],
    rounds: int,
    device: torch.device,
) -> list[list[str]]:
    """A row for each share of active neurons and number of tokens."""
    planted_share, normal = shares[0], NormalDist()
    spec, weights = planted(shape, kind, planted_share)
    one, every = dense_layer(weights, 0), tuple(range(len(spec.layers)))
    dense, sparse = (Layers.on(device, spec, weights, gathered) for gathered in ((), every))
    rows, nbytes = [], sum(matrix.nbytes for matrix in one.matrices())
    for active in shares:
        for layers in (dense, sparse):
            layers.scale_biases(normal.inv_cdf(active) / normal.inv_cdf(planted_share))
        planted_share = active
        for count in tokens:
            x = planted_inputs(shape, count, 2)
            before, after = dense.measure(x, rounds), sparse.measure(x, rounds)
            error = np.linalg.norm(after.x - before.x) / np.linalg.norm(before.x - x)
            cells = [f"{shape.name} {kind}", f"{active:.0%}", str(count)]
            cells += [f"{each.seconds * 1e6:.1f} us" for each in (before, after)]
            cells += [f"{after.seconds / before.seconds:.3f}x", f"{byte_share(one, active):.3f}x"]
            cells += [f"{nbytes / before.seconds / 1e9:.0f}", f"{after.listed:.1%}", f"{error:.1e}"]
            rows.append(cells)
            print(" | ".join(cells), file=sys.stderr, flush=True)
    return rows


def options() -> argparse.Namespace:
    """The options of the command line after `--one-layer --device cuda`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one-layer", action="store_true", help="a single feed-forward")
    parser.add_argument("--device", default="cuda", choices=("cuda",), help="this program")
    parser.add_argument("--shapes", default="relu-7b,relu2-4b", help="planted shapes (%(default)s)")
    parser.add_argument("--types", default="Q4_0,Q8_0,Q4_K", help="formats with commas (%(default)s)")
    parser.add_argument("--active", default="0.05,0.1,0.2,0.4", help="active shares (%(default)s)")
    parser.add_argument("--tokens", default="1,4", help="tokens of a step (%(default)s)")
    parser.add_argument("--rounds", type=int, default=suites.ROUNDS, help="(%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a small shape; compiled without a GPU")
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark with the options of the command line."""
    given, has_gpu = options(), bool(list_gpus())
    if not has_gpu and not given.smoke:
        raise SettingError("--device cuda: this machine has no GPU; --smoke compiles the kernels")
    if given.smoke:
        given.shapes, given.types, given.active, given.rounds = "smoke", "Q4_0", "0.1", 1
    tokens, rows = suites.whole_numbers("--tokens", given.tokens, 1), list[list[str]]()
    cases = list(product(map(find_planted, suites.words(given.shapes)), suites.words(given.types)))
    facts = [f"GPU: {gpu_name()}", *this_machine(command_line()).lines()]
    if not has_gpu:
        rows = [row for shape, kind in cases for row in compiled_rows(shape, kind, tokens)]
        tables = [(f"Compiled for sm_{COMPILED_FOR}", markdown(COMPILED_HEAD, rows, left=(0, 1)))]
    else:
        device = cuda_device(0)
        with current(device):
            for shape, kind in cases:
                rows += rows_of(shape, kind, suites.shares(given.active), tokens, given.rounds, device)
        tables = [("One layer on a GPU", markdown(HEAD, rows))]
    suites.write_report("Gathered neurons on a GPU", facts, tables, given.out)
