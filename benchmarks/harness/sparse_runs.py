"""Feed-forward blocks timed against each other on the same inputs: dense, sparse, sparse with a predictor."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from edgeinfer.benchmarking.bench_targets import wait_until_idle
from edgeinfer.benchmarking.timings import Timings
from edgeinfer.loading.loading import load
from edgeinfer.model import Model
from edgeinfer.options.load_options import Sparse
from edgeinfer.profiling.predictor_training import Samples, TrainedPredictor, train
from edgeinfer.profiling.recording import cpu_engine
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.blocks.feed_forward import NEURON_GROUP
from edgeinfer_kernels.cpu.backend import CpuBackend, CpuOptions
from edgeinfer_kernels.cpu.compiler.features import choose
from edgeinfer_kernels.cpu.compiler.kernel_cache import load_kernels
from edgeinfer_kernels.cpu.compiler.kernel_units import kernel_units
from edgeinfer_kernels.cpu.sparse import SparseLayers, dense_layer, sparse_unit
from edgeinfer_kernels.decoder import BlockIndex, DecoderSpec, DecoderWeights, LayerWeights
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_quant_formats import block_format
from harness.planted_neurons import PlantedShape, normed_inputs, planted_decoder, planted_inputs

FEED_FORWARD = 1
"""Position of the feed-forward in a layer."""
DENSE, EXACT, PREDICTED = "dense", "exact", "predicted"
PIECE = 5
"""Tokens per turn; the first isn't counted."""
BYTES_OF_WEIGHTS = 200 << 20
"""Layers are added until their weights exceed all caches."""
TRAINING_TOKENS, PREDICTOR_RANK = 2048, 64

Inputs = npt.NDArray[np.float32]
Report = Callable[[str], None]


@dataclass(frozen=True)
class SparseRun:
    """The feed-forward of one model with one thread count."""

    name: str
    threads: int
    timings: Mapping[str, Timings]
    """By variant: seconds of one layer for one token, including the call."""
    active: float
    errors: Mapping[str, float]
    """By variant: |y - dense| / |dense - x|, over all layers and tokens."""
    dense_bytes: int
    """Of the matrices of a layer that a token reads."""
    trained: TrainedPredictor | None


def measure(
    backends: Mapping[str, CpuBackend], inputs: Inputs, rounds: int
) -> tuple[dict[str, Timings], dict[str, float]]:
    """Times and errors of all backends on `inputs` (tokens, layers, width): in each round each of them runs
    a piece of PIECE tokens. The first round isn't counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in backends}
    for turn in range(rounds + 1):
        tokens = [inputs[(turn * PIECE + index) % len(inputs)] for index in range(PIECE)]
        for name, backend in backends.items():
            wait_until_idle()
            timed = [_token_seconds(backend, rows) / len(rows) for rows in tokens]
            if turn:
                seconds[name] += timed[1:]
    outputs = {name: _outputs(backend, inputs[:PIECE]) for name, backend in backends.items()}
    added = np.linalg.norm(outputs[DENSE] - inputs[:PIECE])
    errors = {
        name: float(np.linalg.norm(output - outputs[DENSE]) / added) for name, output in outputs.items()
    }
    return {name: Timings(tuple(output)) for name, output in seconds.items()}, errors


def _token_seconds(backend: CpuBackend, rows: Inputs) -> float:
    x, total = backend.embed([0]), 0.0
    for layer, row in enumerate(rows):
        x[:] = row
        begin = time.perf_counter()
        backend.run_block(BlockIndex(layer, FEED_FORWARD), x, 0)
        total += time.perf_counter() - begin
    return total


def _outputs(backend: CpuBackend, inputs: Inputs) -> Inputs:
    outputs, x = np.empty_like(inputs), backend.embed([0])
    for token, rows in enumerate(inputs):
        for layer, row in enumerate(rows):
            x[:] = row
            backend.run_block(BlockIndex(layer, FEED_FORWARD), x, 0)
            outputs[token, layer] = x[0]
    return outputs


def planted_run(
    shape: PlantedShape,
    kind: str,
    active: float,
    threads: Sequence[int],
    rounds: int,
    report: Report,
    hot: float = 0.0,
) -> list[SparseRun]:
    """A planted model with each thread count; its predictor is trained as by `edgeinfer profile`; experts
    have none.

    `hot`: share of neurons on another device; only the others are timed.
    """
    is_small = shape.name.startswith("smoke")
    layers = 2 if is_small else -(-BYTES_OF_WEIGHTS // block_format(kind).nbytes((shape.elements,)))
    facts, weights = planted_decoder(shape, kind, layers, active)
    variants: dict[str, SparseLayers] = {DENSE: {}, EXACT: dict.fromkeys(range(layers))}
    trained, first = None, 0
    if not shape.experts:
        report(f"training a predictor for {shape.name} {kind}")
        trained = _trained(shape, weights)
        first = round(hot * shape.neurons / NEURON_GROUP) * NEURON_GROUP
        weights = _cold_part(weights, first)
        variants[PREDICTED] = dict.fromkeys(range(layers), trained.predictor.of_neurons(first, shape.neurons))
    layer_bytes = _layer_bytes(weights) * shape.experts_per_token
    inputs = np.stack([planted_inputs(shape, 8 * PIECE, 2 + layer) for layer in range(layers)], axis=1)
    runs = []
    for count in threads:
        backends = {}
        for name, sparse in variants.items():
            report(f"  {count} threads: packing {name}")
            backends[name] = _backend(facts, weights, sparse, count)
        timings, errors = measure(backends, inputs, rounds)
        for backend in backends.values():
            backend.close()
        name = f"{shape.name} {kind}" + (f", {first} of {shape.neurons} elsewhere" if first else "")
        runs.append(SparseRun(name, count, timings, active, errors, layer_bytes, trained))
    return runs


def _trained(shape: PlantedShape, weights: DecoderWeights) -> TrainedPredictor:
    w = dense_layer(weights, 0)
    x = normed_inputs(planted_inputs(shape, TRAINING_TOKENS, 1))
    relu_rows, bias = (w.ffn_gate, w.ffn_gate_bias) if w.ffn_gate else (w.ffn_up, w.ffn_up_bias)
    is_active = x @ relu_rows.decoded().T + np.asarray(bias) > 0
    samples = Samples(x.astype(np.float16), np.packbits(is_active, axis=1))
    return train(w, samples, [PREDICTOR_RANK])[0]


def _cold_part(weights: DecoderWeights, first: int) -> DecoderWeights:
    """The same with the neurons from `first` on."""
    wholes = [dense_layer(weights, index) for index in range(len(weights.layers))]
    parts = [whole.of_neurons(first, whole.ffn_up.rows) for whole in wholes]
    layers = [
        LayerWeights((layer.blocks[0], layer.blocks[FEED_FORWARD].with_block(part)))
        for layer, part in zip(weights.layers, parts, strict=True)
    ]
    return replace(weights, layers=tuple(layers))


def _layer_bytes(weights: DecoderWeights) -> int:
    """Of a layer's matrices, or of those of one expert."""
    return sum(matrix.nbytes for matrix in sparse_unit(weights, 0).matrices())


def _backend(facts: DecoderSpec, weights: DecoderWeights, sparse: SparseLayers, threads: int) -> CpuBackend:
    kernels = load_kernels(user_folder("cache"), choose(), kernel_units(weights, sparse=sparse))
    state = DecoderState.allocate(facts, 16, "f16")
    return CpuBackend(facts, weights, state, kernels, CpuOptions(16, threads, sparse=sparse))


def model_run(path: str, variants: Sequence[str], threads: int, rounds: int, tokens: int = 40) -> SparseRun:
    """A model's feed-forward on its inputs during generation; `variants`: variants besides dense."""
    options: dict[str, Sparse] = {DENSE: "off", EXACT: "exact", PREDICTED: "predicted"}
    loaded: dict[str, Model] = {}
    try:
        for way in (DENSE, *variants):
            loaded[way] = load(
                path, sparse=options[way], threads=threads, device="cpu", draft=None, context=256
            )
        inputs, active = _recorded(loaded[DENSE], tokens)
        backends = {way: cpu_engine(model)[1] for way, model in loaded.items()}
        timings, errors = measure(backends, inputs, rounds)
        weights, name = backends[DENSE].weights, loaded[DENSE].name
    finally:
        for model in loaded.values():
            model.close()
    return SparseRun(name, threads, timings, active, errors, _layer_bytes(weights), None)


def _recorded(model: Model, tokens: int) -> tuple[Inputs, float]:
    """The input of every layer's feed-forward, (tokens, layers, width), and the active share."""
    ids = model.generate("Once upon a time", max_tokens=tokens, temperature=1.0, seed=1).ids
    engine, backend = cpu_engine(model)
    engine.rewind(0)
    rows, active = [], []
    for position, token in enumerate(ids):
        x, of_token = backend.embed([token]), []
        for layer in range(len(engine.specification.layers)):
            backend.run_block(BlockIndex(layer, 0), x, position)
            of_token.append(x[0].copy())
            backend.run_block(BlockIndex(layer, FEED_FORWARD), x, position)
            active.append(float(np.mean(backend.decoder.feed_forward_rows(layer, 1)[1] != 0)))
        engine.cache.append([token])
        rows.append(np.stack(of_token))
    return np.stack(rows), float(np.mean(active))
