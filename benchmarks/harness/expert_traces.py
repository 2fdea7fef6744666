"""Recorded traces of experts: which a token went to in each layer, of a mixture or of a model made one.

A dense model with a ReLU is made a mixture by grouping the neurons of a layer that are active together; a
token's experts are the groups with the most active neurons. Source: Zhang et al. 2022, MoEfication, §3.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer.loading.loading import load
from edgeinfer.model import Model
from edgeinfer.profiling.recording import WINDOW, cpu_engine, record, told_by, windows_of
from edgeinfer_kernels.backend import Activations
from edgeinfer_kernels.specification import ExpertsSpecification

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
ROUNDS = 12


def recorded_traces(
    name: str, texts: Sequence[str], tokens: int, experts: int, used: int, threads: int | None
) -> list[Ints]:
    """For each layer the experts (tokens, used) that the tokens of the texts chose, in their order; without
    any text of what the model tells by itself. `experts`, `used`: what a dense model is made.

    Raises `EdgeInferError`: what `load` raises, or a model that tells nothing.
    """
    with load(name, device="cpu", sparse="off", draft=None, threads=threads) as model:
        ids = [token for text in texts for token in model.tokenizer.encode(text)][:tokens]
        windows = windows_of(ids, min(WINDOW, model.context)) if texts else told_by(model, tokens)
        facts = [layer.feed_forward for layer in cpu_engine(model)[0].specification.layers]
        active = _active(model, windows)
    found = []
    for fact, seen in zip(facts, active, strict=True):
        if isinstance(fact, ExpertsSpecification):
            found.append(np.nonzero(seen)[1].reshape(len(seen), fact.used))
        else:
            found.append(most_active(seen, grouped(seen[: len(seen) // 2], experts), used))
    return found


def _active(model: Model, windows: Sequence[Sequence[int]]) -> list[Bools]:
    """For each layer which neurons or experts were active, (tokens, units)."""
    layers: dict[int, list[Bools]] = {}

    def seen(layer: int, normed: Activations | None, active: Bools) -> None:
        layers.setdefault(layer, []).append(active)

    record(model, windows, seen)
    return [np.concatenate(layers[layer]) for layer in sorted(layers)]


def grouped(active: Bools, groups: int) -> Ints:
    """The group (neurons,) of each neuron, all of one size, such that neurons of a group are active together:
    k-means on what they were active for, `active` (tokens, neurons).
    """
    rows = active.T.astype(np.float32) - active.mean(axis=1, dtype=np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True) + 1e-6
    size = -(-len(rows) // groups)
    centres = rows[np.random.default_rng(0).permutation(len(rows))[:groups]]
    group = np.zeros(len(rows), np.int64)
    for _ in range(ROUNDS):
        group = _filled(rows @ centres.T, size)
        centres = np.stack([rows[group == number].mean(axis=0) for number in range(groups)])
        centres /= np.linalg.norm(centres, axis=1, keepdims=True) + 1e-6
    return group


def _filled(likeness: npt.NDArray[np.float32], size: int) -> Ints:
    """A group for each row of `likeness` (rows, groups), the likest pairs first, `size` rows a group."""
    group, room = np.full(len(likeness), -1, np.int64), np.full(likeness.shape[1], size)
    for flat in np.argsort(-likeness, axis=None):
        row, number = divmod(int(flat), likeness.shape[1])
        if group[row] < 0 and room[number]:
            group[row] = number
            room[number] -= 1
    return group


def most_active(active: Bools, group: Ints, used: int) -> Ints:
    """(tokens, used): of each token the groups with the most active neurons."""
    member = np.zeros((len(group), int(group.max()) + 1), np.float32)
    member[np.arange(len(group)), group] = 1
    counts = active.astype(np.float32) @ member
    return np.argsort(-counts, axis=1, kind="stable")[:, :used]
